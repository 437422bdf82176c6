"""The mixer: conformance contracts, padding and documents in any windows, training in a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec

import implicit_blocks as ib
from implicit_blocks.ops.backends import Backend
from implicit_blocks.testing import CUTS, MIXER_CONTRACTS, PADDINGS, check_walk
from implicit_blocks.testing.mixer_runs import run

D_MODEL, LENGTH = 12, 20

SPECS = {
    "plain": RWKV7Spec(n_heads=2, head_dim=4, chunk_size=4, decay_rank=3, rate_rank=3, gate_rank=5),
    "negative-eigenvalues": RWKV7Spec(n_heads=3, head_dim=2, negative_eigenvalues=True),
    "one-head": RWKV7Spec(n_heads=1, head_dim=8, chunk_size=1, decay_rank=1),
}
WALKED = RWKV7Spec(n_heads=2, head_dim=4, negative_eigenvalues=True, chunk_size=8)


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
def test_decays_stay_within_the_bound_that_the_scan_relies_on(monkeypatch, mixer_inputs):
    from implicit_blocks_rwkv7 import mixer as module

    seen = []

    def spy(r, log_w, k, v, a, b, **options):
        seen.append((float(log_w.min()), float(log_w.max()), float(b.norm(dim=-1).max())))
        return scan(r, log_w, k, v, a, b, **options)

    scan = module.DELTA_RULE.choose("plain", *[torch.zeros(1)] * 6).run
    monkeypatch.setattr(module.DELTA_RULE, "choose", lambda *inputs: Backend("spy", spy))
    for negative in (False, True):
        mixer = ib.build(
            RWKV7Spec(n_heads=2, head_dim=4, negative_eigenvalues=negative), d_model=D_MODEL
        ).double()
        z, u = mixer_inputs(mixer, D_MODEL)
        run(mixer, z, 50 * u, [LENGTH])
    assert all(low >= -module.FASTEST_DECAY and high <= 0 for low, high, _ in seen)
    assert seen[0][2] <= 1 < seen[1][2] <= 2


def test_the_previous_token_is_read_only_through_the_shift(mixer_inputs):
    """Every projection reads only the previous token, so a token has no influence on its own output."""
    mixer = ib.build(WALKED, d_model=D_MODEL).double()
    with torch.no_grad():
        for shift in mixer.shift.values():
            shift.fill_(1.0)  # every projection reads only the previous token
    z, u = mixer_inputs(mixer, D_MODEL, batch=1)
    y, _ = run(mixer, z, u, [LENGTH])
    (gradient,) = torch.autograd.grad(y[0, 7].sum(), z)
    touched = gradient[0].abs().sum(1).nonzero().squeeze(1).tolist()
    assert touched == list(range(7))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_with_the_mixer_trains(check_trains_in_a_model, precision):
    check_trains_in_a_model(RWKV7Spec(n_heads=2, head_dim=4), d_model=D_MODEL, precision=precision)


def make_contracting(mixer: Any) -> None:
    """Scale the weights: as initialized, the map of so narrow a model does not contract."""
    for projection in mixer.projections.values():
        projection.weight = 0.03 * projection.weight
    mixer.out_proj.weight = 9 * mixer.out_proj.weight


def test_simultaneous_and_sequential_modes_agree(check_modes_agree):
    spec = SPECS["negative-eigenvalues"]
    check_modes_agree(spec, d_model=D_MODEL, length=12, max_iterations=100, adapt=make_contracting)
