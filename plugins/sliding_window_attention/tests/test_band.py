"""Attention in a band against its definition: values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from implicit_blocks_sliding_window import band
from implicit_blocks_sliding_window.band import attend_in_band, band_masks
from torch import Tensor


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, known: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Attend from every query to every key, masked by distance."""
    group, length, tokens = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    query, key = torch.arange(tokens - length, tokens)[:, None], torch.arange(tokens)
    seen = ((key <= query) & (query - key < window)).expand(q.shape[0], -1, -1)
    if known is not None:
        seen = seen & (key >= tokens - length - known[:, None])[:, None]
    if documents is not None:
        seen = seen & (documents[:, tokens - length :, None] == documents[:, None])
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ v


CASES = [  # tokens, earlier tokens, window
    (1, 0, 1),
    (7, 0, 1),
    (1, 3, 4),
    (5, 2, 4),
    (5, 0, 9),
    (9, 3, 4),
    (12, 0, 4),
    (13, 3, 4),
    (23, 1, 5),
    (30, 6, 7),
]


@pytest.mark.parametrize("minimum", [1, 4, 64], ids=lambda m: f"block{m}")
@pytest.mark.parametrize("variant", ["plain", "known", "documents", "both"])
@pytest.mark.parametrize(("length", "earlier", "window"), CASES, ids=lambda n: str(n))
def test_attention_in_a_band_equals_its_definition(monkeypatch, length, earlier, window, variant, minimum):
    monkeypatch.setattr(band, "MINIMUM_BLOCK", minimum)
    batch, heads, kv_heads, width = 3, 4, 2, 6
    q, k, v = (
        torch.randn(batch, h, t, width, dtype=torch.float64, requires_grad=True)
        for h, t in ((heads, length), (kv_heads, earlier + length), (kv_heads, earlier + length))
    )
    known = documents = None
    if variant in ("known", "both"):
        known = torch.randint(0, earlier + 1, (batch,))
    if variant in ("documents", "both"):
        documents = torch.randint(0, 2, (batch, earlier + length)).cumsum(1) // 3
    masks = band_masks(length, earlier, window=window, device=q.device, known_B=known, documents_BT=documents)
    y = attend_in_band(q, k, v, masks, window=window)
    expected = naive(q, k, v, window=window, known=known, documents=documents)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(y)
    found = torch.autograd.grad((y * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for name, gradient, oracle in zip("qkv", found, wanted, strict=True):
        torch.testing.assert_close(
            gradient, oracle, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_mask_size_does_not_grow_with_the_sequence():
    short, long = (band_masks(n, 0, window=64, device=torch.device("cpu")) for n in (1024, 65_536))
    assert short.blocks is not None
    assert long.blocks is not None
    assert short.blocks.numel() == long.blocks.numel() == 64 * 127
    assert short.first is None  # the first block is causal and needs no mask
