"""The mixer: padding and documents in any windows, a state of bounded size, cost linear in length."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from implicit_blocks_sliding_window import SlidingWindowAttentionSpec, band
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.testing import CUTS, PADDINGS, check_walk
from implicit_blocks.testing.mixer_runs import run

D_MODEL, LENGTH = 16, 24


def make(window: int, **options) -> ib.Mixer:
    return ib.build(
        SlidingWindowAttentionSpec(window=window, n_heads=4, n_kv_heads=2, **options), d_model=D_MODEL
    ).double()


# Tokens one by one, or an attention window of more than the sequence, are never divided into blocks.
WALKS = [(window, "blocks", cuts) for window in (1, 4, 7) for cuts in CUTS if cuts != "tokens"]
WALKS += [(window, "dense", cuts) for window in (4, 50) for cuts in CUTS]
slow = pytest.mark.slow
WALKS += [pytest.param(window, "dense", cuts, marks=slow) for window in (1, 7) for cuts in CUTS]


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("window", "path", "cuts"), WALKS)
def test_padding_and_batch_mates_do_not_change_a_row(monkeypatch, window, path, cuts, padding, documents):
    monkeypatch.setattr(band, "MINIMUM_BLOCK", 1 if path == "blocks" else 64)
    spec = SlidingWindowAttentionSpec(window=window, n_heads=4, n_kv_heads=2)
    check_walk(spec, padding=padding, cuts=cuts, documents=documents, length=LENGTH)


@pytest.mark.parametrize("length", [5, 40])
def test_a_window_of_the_whole_sequence_equals_full_attention(mixer_inputs, length):
    mixer = make(length, rope_theta=1000.0)
    attention = ib.build(
        ib.AttentionSpec(n_heads=4, n_kv_heads=2, rope_theta=1000.0), d_model=D_MODEL
    ).double()
    attention.load_state_dict(mixer.state_dict())
    z, u = mixer_inputs(mixer, D_MODEL, batch=4, length=length)
    ours, _ = run(mixer, z, u, [length])
    theirs, _ = run(attention, z, u, [length])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_token_attends_to_itself_and_the_window_minus_one_tokens_before(mixer_inputs):
    mixer = make(4)
    z, u = mixer_inputs(mixer, D_MODEL, batch=1, length=LENGTH)
    y, _ = run(mixer, z, u, [LENGTH])
    (gradient,) = torch.autograd.grad(y[0, 20].sum(), z)
    assert gradient[0].abs().sum(1).nonzero().squeeze(1).tolist() == [17, 18, 19, 20]


def stored_bytes(state: tuple[Tensor, Tensor]) -> int:
    return sum(part.untyped_storage().nbytes() for part in state)


@torch.no_grad()
def test_the_state_stops_growing(mixer_inputs):
    mixer = make(8)
    z, u = mixer_inputs(mixer, D_MODEL, batch=4, length=600)
    sizes = []
    for cuts in ([600], [300, 300], [1] * 600, [5] * 120):
        _, state = run(mixer, z, u, list(itertools.accumulate(cuts)))
        sizes.append(stored_bytes(state))
    keys_and_values = 2 * 4 * 2 * 7 * (D_MODEL // 4) * 8  # two of (B, K, w − 1, P) in float64
    assert sizes == [keys_and_values] * 4


@torch.no_grad()
def test_the_state_of_padded_rows_stops_growing(mixer_inputs):
    mixer = make(8)
    z, u = mixer_inputs(mixer, D_MODEL, batch=4, length=LENGTH)
    valid = torch.rand(4, LENGTH) < torch.tensor([1.0, 0.8, 0.5, 0.1])[:, None]
    _, state = run(mixer, z, u, [1, 8, 10, 21, LENGTH], valid=valid)
    assert stored_bytes(state) == 2 * 4 * 2 * 7 * (D_MODEL // 4) * 8


@torch.no_grad()
def test_cost_is_linear_in_length(mixer_inputs, monkeypatch):
    """Counts the pairs of query and key that the kernel receives."""
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
        z, u = mixer_inputs(mixer, D_MODEL, batch=1, length=length)
        run(mixer, z, u, [length])
        counts.append(pairs)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) == 2048 * (64 + 63)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_with_the_mixer_trains(check_trains_in_a_model, precision):
    spec = SlidingWindowAttentionSpec(window=4, n_heads=4)
    check_trains_in_a_model(spec, d_model=D_MODEL, precision=precision)


def make_contracting(mixer: Any) -> None:
    """Scale the weights: as initialized, the map of so narrow a model hardly contracts."""
    mixer.in_proj.weight = 0.15 * mixer.in_proj.weight
    mixer.out_proj.weight = 10 * mixer.out_proj.weight


def test_simultaneous_and_sequential_modes_agree(check_modes_agree):
    spec = SlidingWindowAttentionSpec(window=4, n_heads=4)
    check_modes_agree(spec, d_model=D_MODEL, length=12, max_iterations=100, adapt=make_contracting)
