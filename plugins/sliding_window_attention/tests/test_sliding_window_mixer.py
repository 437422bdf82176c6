"""The mixer: padding and documents in any windows, a state that stops growing, cost linear in length."""

from __future__ import annotations

import itertools

import pytest
import torch
from implicit_blocks_sliding_window import SlidingWindowAttentionSpec, band
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.testing import CUTS, PADDINGS, check_walk
from implicit_blocks.testing.mixer_runs import run

D_MODEL, LENGTH = 16, 40


def make(window: int, **options) -> ib.Mixer:
    return ib.build(
        SlidingWindowAttentionSpec(window=window, n_heads=4, n_kv_heads=2, **options), d_model=D_MODEL
    ).double()


def inputs(mixer: ib.Mixer, batch: int = 4, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(batch, length, D_MODEL, dtype=torch.float64, requires_grad=True),
        torch.randn(batch, length, mixer.injection_width, dtype=torch.float64, requires_grad=True),
    )


@pytest.mark.parametrize("minimum_block", [1, 64], ids=["blocks", "dense"])
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("window", [1, 4, 7, 50])
def test_every_row_is_mixed_as_if_alone_without_padding(
    monkeypatch, window, cuts, padding, documents, minimum_block
):
    monkeypatch.setattr(band, "MINIMUM_BLOCK", minimum_block)
    spec = SlidingWindowAttentionSpec(window=window, n_heads=4, n_kv_heads=2)
    check_walk(spec, padding=padding, cuts=cuts, documents=documents, length=LENGTH)


@pytest.mark.parametrize("length", [5, 40])
def test_without_a_limit_it_is_the_librarys_attention(length):
    mixer = make(length, rope_theta=1000.0)
    attention = ib.build(
        ib.AttentionSpec(n_heads=4, n_kv_heads=2, rope_theta=1000.0), d_model=D_MODEL
    ).double()
    attention.load_state_dict(mixer.state_dict())
    z, u = inputs(mixer, length=length)
    ours, _ = run(mixer, z, u, [length])
    theirs, _ = run(attention, z, u, [length])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_token_sees_itself_and_window_minus_one_before():
    mixer = make(4)
    z, u = inputs(mixer, batch=1)
    y, _ = run(mixer, z, u, [LENGTH])
    (gradient,) = torch.autograd.grad(y[0, 20].sum(), z)
    assert gradient[0].abs().sum(1).nonzero().squeeze(1).tolist() == [17, 18, 19, 20]


def stored_bytes(state: tuple[Tensor, Tensor]) -> int:
    return sum(part.untyped_storage().nbytes() for part in state)


@torch.no_grad()
def test_the_state_stops_growing():
    mixer = make(8)
    z, u = inputs(mixer, length=600)
    sizes = []
    for cuts in ([600], [300, 300], [1] * 600, [5] * 120):
        _, state = run(mixer, z, u, list(itertools.accumulate(cuts)))
        sizes.append(stored_bytes(state))
    keys_and_values = 2 * 4 * 2 * 7 * (D_MODEL // 4) * 8  # two of (B, K, w − 1, P) in float64
    assert sizes == [keys_and_values] * 4


@torch.no_grad()
def test_the_state_of_padded_rows_stops_growing_too():
    mixer = make(8)
    z, u = inputs(mixer)
    valid = torch.rand(4, LENGTH) < torch.tensor([1.0, 0.8, 0.5, 0.1])[:, None]
    _, state = run(mixer, z, u, [1, 13, 16, 36, LENGTH], valid=valid)
    assert stored_bytes(state) == 2 * 4 * 2 * 7 * (D_MODEL // 4) * 8


@torch.no_grad()
def test_cost_is_linear_in_length(monkeypatch):
    """Pairs of query and key that the kernel is given, counted."""
    pairs = 0

    def counting(q, k, v, **options):
        nonlocal pairs
        pairs += q.shape[0] * q.shape[2] * k.shape[2]
        return attend(q, k, v, **options)

    attend = band.attend
    monkeypatch.setattr(band, "attend", counting)
    mixer = make(64)
    counts = []
    for length in (1024, 2048, 4096):
        pairs = 0
        z, u = inputs(mixer, batch=1, length=length)
        run(mixer, z, u, [length])
        counts.append(pairs)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) == 2048 * (64 + 63)


@pytest.mark.parametrize("iterations", ["float32", "bfloat16"])
def test_trains_in_a_model(iterations):
    model = ib.build(
        ib.ImplicitLMSpec(
            vocab_size=11,
            d_model=D_MODEL,
            n_layers=2,
            mixer=SlidingWindowAttentionSpec(window=4, n_heads=4),
            mlp=ib.SwiGLUSpec(d_ff=24),
        )
    )
    tokens = torch.randint(0, 11, (3, 12))
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, :5] = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=iterations == "bfloat16"):
        out = model(tokens, labels=tokens, attention_mask=attention_mask)
    out.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("window_length", [1, 5])
@torch.no_grad()
def test_simultaneous_and_sequential_modes_agree(window_length):
    model = ib.build(
        ib.ImplicitLMSpec(
            vocab_size=11,
            d_model=D_MODEL,
            n_layers=1,
            mixer=SlidingWindowAttentionSpec(window=4, n_heads=4),
            stopping=ib.Stopping(tolerance=1e-12, max_iterations=1000),
        )
    )
    model.double().eval()
    tokens = torch.randint(0, 11, (3, 20))
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, :5] = 0
    attention_mask[2, 9:] = 0
    whole = model(tokens, attention_mask=attention_mask)
    parts = model(tokens, attention_mask=attention_mask, window_length=window_length)
    assert bool(whole.solution.converged.all())
    real = attention_mask.bool()
    torch.testing.assert_close(parts.logits[real], whole.logits[real], rtol=0, atol=1e-9)
