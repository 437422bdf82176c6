"""The mixer: the library's contracts, padding and documents in any windows, models that train."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.committed import Committed
from implicit_blocks.testing import MIXER_CONTRACTS

D_MODEL, LENGTH = 12, 20

SPECS = {
    "plain": RWKV7Spec(n_heads=2, head_dim=4, chunk_size=4, decay_rank=3, rate_rank=3, gate_rank=5),
    "negative-eigenvalues": RWKV7Spec(n_heads=3, head_dim=2, negative_eigenvalues=True),
    "one-head": RWKV7Spec(n_heads=1, head_dim=8, chunk_size=1, decay_rank=1),
}


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", SPECS)
def test_contract(name, contract):
    MIXER_CONTRACTS[contract](SPECS[name])


def make(**options) -> ib.Mixer:
    spec = RWKV7Spec(n_heads=2, head_dim=4, negative_eigenvalues=True, chunk_size=8, **options)
    mixer = ib.build(spec, d_model=D_MODEL).double()
    with torch.no_grad():  # ρ starts at 0 and would hide mistakes
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def run(
    mixer: ib.Mixer,
    z: Tensor,
    u: Tensor,
    lengths: list[int],
    *,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Committed]:
    """Mix windows of these lengths, committing each; only windows with padding are told of it."""
    batch = z.shape[0]
    state = mixer.initial_state(batch, device=z.device, dtype=z.dtype)
    committed = Committed(batch, 0, torch.zeros(1, dtype=torch.int64), (state,))
    outputs, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        padding = None if valid is None or bool(valid[:, part].all()) else valid[:, part]
        window = committed.window(
            length,
            valid_BL=padding,
            documents_BL=None if documents is None else documents[:, part],
            dtype=z.dtype,
        )
        y, state = mixer.advance(z[:, part], u[:, part], committed.layers[0], mixer.prepare(window))
        committed = committed.after(window, (state,))
        outputs.append(y)
        first += length
    assert first == z.shape[1]
    return torch.cat(outputs, dim=1), committed


def inputs(mixer: ib.Mixer, batch: int = 3) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(batch, LENGTH, D_MODEL, dtype=torch.float64, requires_grad=True),
        torch.randn(batch, LENGTH, mixer.injection_width, dtype=torch.float64, requires_grad=True),
    )


CUTS = {
    "one window": [LENGTH],
    "ragged windows": [1, 8, 3, 6, 2],
    "tokens": [1] * LENGTH,
}


def padding(kind: str) -> Tensor | None:
    """Where the tokens of 3 rows are real."""
    if kind == "none":
        return None
    valid = torch.ones(3, LENGTH, dtype=torch.bool)
    for row, count in enumerate((0, 2, 7)):
        if kind == "left":
            valid[row, :count] = False
        elif kind == "right":
            valid[row, LENGTH - count :] = False
        elif kind == "between":  # a batch of prompts, padded on the right, goes on together
            valid[row, 9 - count : 9] = False
        else:
            valid[row, torch.randperm(LENGTH)[: 2 * count]] = False
    return valid


@pytest.mark.parametrize("with_documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("kind", ["none", "left", "right", "between", "holes"])
@pytest.mark.parametrize("cuts", CUTS)
def test_every_row_is_mixed_as_if_alone_without_padding(kind, cuts, with_documents):
    mixer = make()
    z, u = inputs(mixer)
    valid = padding(kind)
    documents = torch.rand(3, LENGTH).lt(0.2).long().cumsum(1) if with_documents else None
    y, committed = run(mixer, z, u, CUTS[cuts], valid=valid, documents=documents)
    assert bool(y.isfinite().all())
    weights = torch.randn_like(y)
    loss = expected_loss = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        real = torch.ones(LENGTH, dtype=torch.bool) if valid is None else valid[row]
        pick = (slice(row, row + 1), real)
        alone, alone_committed = run(
            mixer,
            z[pick],
            u[pick],
            [int(real.sum())],
            documents=None if documents is None else documents[pick],
        )
        torch.testing.assert_close(y[pick], alone, rtol=1e-11, atol=1e-11)
        states = zip(committed.layers[0], alone_committed.layers[0], strict=True)
        for part, alone_part in states:
            torch.testing.assert_close(part[row : row + 1], alone_part, rtol=1e-11, atol=1e-11)
        loss = loss + (y[pick] * weights[pick]).sum()
        expected_loss = expected_loss + (alone * weights[pick]).sum()
    tensors = (z, u, *mixer.parameters())
    found, expected = (torch.autograd.grad(total, tensors) for total in (loss, expected_loss))
    for gradient, oracle in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, oracle, rtol=1e-10, atol=1e-10)


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
    mixer = make()
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
            mlp=ib.SwiGLUSpec(d_hidden=24),
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
