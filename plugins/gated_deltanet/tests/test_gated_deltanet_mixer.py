"""The mixer: conformance contracts, padding and documents in any windows, training in a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implicit_blocks_gated_deltanet import GatedDeltaNetSpec

import implicit_blocks as ib
from implicit_blocks.testing import CUTS, MIXER_CONTRACTS, PADDINGS, check_walk
from implicit_blocks.testing.mixer_runs import run

D_MODEL, LENGTH = 12, 20

SPECS = {
    "plain": GatedDeltaNetSpec(n_heads=2, head_dim=4, chunk_size=4),
    "negative-eigenvalues": GatedDeltaNetSpec(n_heads=3, head_dim=2, negative_eigenvalues=True, expand_v=1),
    "biases": GatedDeltaNetSpec(n_heads=1, head_dim=4, bias=True, conv_bias=True, d_conv=2),
    "no-convolution": GatedDeltaNetSpec(n_heads=1, head_dim=4, d_conv=1, chunk_size=2),
}
WALKED = GatedDeltaNetSpec(n_heads=2, head_dim=4, negative_eigenvalues=True, chunk_size=8)


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", SPECS)
def test_the_mixer_satisfies_the_contract(name, contract):
    MIXER_CONTRACTS[contract](SPECS[name])


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cuts", CUTS)
def test_padding_and_batch_mates_do_not_change_a_row(cuts, padding, documents):
    check_walk(WALKED, padding=padding, cuts=cuts, documents=documents)


@torch.no_grad()
def test_only_negative_eigenvalues_make_beta_exceed_one(monkeypatch, mixer_inputs):
    from implicit_blocks_gated_deltanet import mixer as module

    seen = []

    def spy(q, k, v, g, beta, **options):
        seen.append(float(beta.max()))
        return scan(q, k, v, g, beta, **options)

    scan = module.gated_delta_rule
    monkeypatch.setattr(module, "gated_delta_rule", spy)
    for negative in (False, True):
        spec = GatedDeltaNetSpec(n_heads=2, head_dim=4, negative_eigenvalues=negative)
        mixer = ib.build(spec, d_model=D_MODEL).double()
        z, u = mixer_inputs(mixer, D_MODEL)
        run(mixer, z, 5 * u, [LENGTH])
    assert seen[0] <= 1 < seen[1] <= 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_with_the_mixer_trains(check_trains_in_a_model, precision):
    check_trains_in_a_model(GatedDeltaNetSpec(n_heads=2, head_dim=4), d_model=D_MODEL, precision=precision)


def make_contracting(mixer: Any) -> None:
    """Scale the weights: as initialized, the map of so narrow a model does not contract."""
    mixer.in_proj.weight, mixer.out_proj.weight = 0.03 * mixer.in_proj.weight, 9 * mixer.out_proj.weight


def test_simultaneous_and_sequential_modes_agree(check_modes_agree):
    spec = SPECS["negative-eigenvalues"]
    check_modes_agree(spec, d_model=D_MODEL, length=12, max_iterations=100, adapt=make_contracting)
