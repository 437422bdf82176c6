"""The spec: its costs are those of the mixer it describes, and what doesn't fit is refused."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_gated_deltanet import GatedDeltaNetSpec

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import check_plugin


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("expand_v", [1, 2])
def test_parameters_are_counted_as_built(expand_v, bias):
    spec = GatedDeltaNetSpec(n_heads=3, head_dim=8, expand_v=expand_v, bias=bias, conv_bias=not bias)
    with torch.device("meta"):
        mixer = ib.build(spec, d_model=20)
    counted = spec.parameter_count(20)
    assert counted.weights == sum(weight.numel() for weight in mixer.parameters())
    rows = sum(p.shape[0] for name, p in mixer.named_parameters() if p.ndim > 1)
    assert counted.weight_normed_rows == rows
    assert spec.injection_width(20) == mixer.injection_width


def test_operations_grow_with_the_state_and_not_with_the_length():
    spec = GatedDeltaNetSpec(n_heads=3, head_dim=8)
    assert spec.flops_per_token(20, 64) == spec.flops_per_token(20, 4096)
    wider = GatedDeltaNetSpec(n_heads=3, head_dim=8, expand_v=4)
    assert wider.flops_per_token(20, 64) > spec.flops_per_token(20, 64)


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"n_heads": 0}, "n_heads", "greater than 0"),
        ({"a_min": 20.0}, "a_min", "a_min 20.0 is above a_max 16.0"),
        ({"negative_eigenvalue": True}, "negative_eigenvalue", "'negative_eigenvalues'"),
        ({"backend": "triton"}, "backend", "'plain' or 'fla'"),
    ],
)
def test_what_does_not_fit_is_refused_in_its_place(fields, place, message):
    with pytest.raises(SpecError) as caught:
        GatedDeltaNetSpec.model_validate({"n_heads": 2, "head_dim": 4, **fields})
    (error,) = caught.value.errors()
    assert error["loc"] == (place,)
    assert message in error["msg"]


def test_knowing_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-gated-deltanet", ("mixer", "gated_deltanet"))
