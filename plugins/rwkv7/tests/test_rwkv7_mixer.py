"""The mixer: the library's contracts, padding and documents in any windows, models that train."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec
from torch import Tensor

import implicit_blocks as ib
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
def test_contract(name, contract):
    MIXER_CONTRACTS[contract](SPECS[name])


def inputs(mixer: ib.Mixer, batch: int = 3) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(batch, LENGTH, D_MODEL, dtype=torch.float64, requires_grad=True),
        torch.randn(batch, LENGTH, mixer.injection_width, dtype=torch.float64, requires_grad=True),
    )


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cuts", CUTS)
def test_every_row_is_mixed_as_if_alone_without_padding(cuts, padding, documents):
    check_walk(WALKED, padding=padding, cuts=cuts, documents=documents)


@torch.no_grad()
def test_decays_stay_within_the_bound_that_the_scan_relies_on(monkeypatch):
    from implicit_blocks_rwkv7 import mixer as module

    seen = []

    def spy(r, log_w, k, v, a, b, **options):
        seen.append((float(log_w.min()), float(log_w.max()), float(b.norm(dim=-1).max())))
        return scan(r, log_w, k, v, a, b, **options)

    scan = module.generalized_delta_rule
    monkeypatch.setattr(module, "generalized_delta_rule", spy)
    for negative in (False, True):
        mixer = ib.build(
            RWKV7Spec(n_heads=2, head_dim=4, negative_eigenvalues=negative), d_model=D_MODEL
        ).double()
        z, u = inputs(mixer)
        run(mixer, z, 50 * u, [LENGTH])
    assert all(low >= -module.FASTEST_DECAY and high <= 0 for low, high, _ in seen)
    assert seen[0][2] <= 1 < seen[1][2] <= 2


def test_the_token_before_is_seen_through_the_shift_alone():
    """With a decay that forgets nothing of one token in another, only ``z_{t−1}`` reaches further back."""
    mixer = ib.build(WALKED, d_model=D_MODEL).double()
    with torch.no_grad():
        for shift in mixer.shift.values():
            shift.fill_(1.0)  # every projection reads the token before, and no token itself
    z, u = inputs(mixer, batch=1)
    y, _ = run(mixer, z, u, [LENGTH])
    (gradient,) = torch.autograd.grad(y[0, 7].sum(), z)
    touched = gradient[0].abs().sum(1).nonzero().squeeze(1).tolist()
    assert touched == list(range(7))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trains_in_a_model(precision):
    model = ib.build(
        ib.ImplicitLMSpec(
            vocab_size=11,
            d_model=D_MODEL,
            n_layers=2,
            mixer=RWKV7Spec(n_heads=2, head_dim=4),
            mlp=ib.SwiGLUSpec(d_ff=24),
        )
    )
    tokens = torch.randint(0, 11, (3, 12))
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, :5] = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        out = model(tokens, labels=tokens, attention_mask=attention_mask)
    out.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@torch.no_grad()
def test_simultaneous_and_sequential_modes_agree():
    model = ib.build(
        ib.ImplicitLMSpec(
            vocab_size=11,
            d_model=D_MODEL,
            n_layers=1,
            mixer=SPECS["negative-eigenvalues"],
            stopping=ib.Stopping(tolerance=1e-12, max_iterations=100),
        )
    )
    model.double().eval()
    mixer = model.backbone.blocks()[0].mixer  # as drawn, so narrow a map does not contract
    for projection in mixer.projections.values():
        projection.weight = 0.03 * projection.weight
    mixer.out_proj.weight = 9 * mixer.out_proj.weight
    tokens = torch.randint(0, 11, (3, 12))
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, :5] = 0
    attention_mask[2, 9:] = 0
    whole = model(tokens, attention_mask=attention_mask)
    assert bool(whole.solution.converged.all())
    real = attention_mask.bool()
    for window_length in (1, 5):
        parts = model(tokens, attention_mask=attention_mask, window_length=window_length)
        torch.testing.assert_close(parts.logits[real], whole.logits[real], rtol=0, atol=1e-9)
