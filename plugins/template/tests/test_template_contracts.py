"""The contracts of mixers, one test each, and the numbers that the spec states."""

from __future__ import annotations

import implicit_blocks as ib
import pytest
import torch
from implicit_blocks.testing import MIXER_CONTRACTS

from implicit_blocks_template import TemplateSpec

SPECS = {
    "narrow": TemplateSpec(),
    "wide": TemplateSpec(expand=2),
}


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", SPECS)
def test_contract(name, contract):
    MIXER_CONTRACTS[contract](SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_the_spec_counts_the_parameters(name):
    spec = SPECS[name]
    with torch.device("meta"):
        mixer = ib.build(spec, d_model=32)
    counted = spec.parameter_count(32)
    assert counted.weights == sum(parameter.numel() for parameter in mixer.parameters())
    assert counted.weight_normed_rows == sum(p.shape[0] for p in mixer.parameters() if p.ndim >= 2)


def test_invalid_settings_are_rejected():
    with pytest.raises(ValueError, match="greater than 0"):
        TemplateSpec(expand=0)
