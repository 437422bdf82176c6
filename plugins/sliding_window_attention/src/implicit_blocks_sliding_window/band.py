"""Attention in a band: each token attends to itself and w − 1 earlier tokens, at a cost linear in length.

The queries are L new tokens; the keys are S ≤ w − 1 earlier tokens and the L new ones, without gaps, so that
their distance is the difference of their indices. Long sequences are divided into blocks of C ≥ w tokens: a
block needs its own keys and the w − 1 before it, so that L · (C + w − 1) scores are computed instead of L².

Shape legend: B batch, L new tokens, S earlier ones, T = S + L, C tokens of a block, N blocks after the first,
R = C + w − 1 keys of such a block, H query heads, K key and value heads, P head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # conventional name

from implicit_blocks.ops.attention import attend

MINIMUM_BLOCK = 64
"""Minimum block size for narrow windows: smaller products cost more than the scores they save."""


class BandMasks(NamedTuple):
    """The keys that each query attends to, computed once per window of tokens.

    ``first`` (1 or B, 1, F, S + F) bool is the mask of the first block, of F queries: C, or L if it is the
    only block. None means causal. ``blocks`` (1 or B · N, 1, C, R) bool is the mask of the blocks after it,
    None if there are none.
    """

    first: Tensor | None
    causal: bool
    blocks: Tensor | None


def attend_in_band(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, masks: BandMasks, *, window: int
) -> Tensor:
    """Return each query's attention over the ``window`` keys that end at its own, (B, H, L, P)."""
    length, earlier = q_BHLP.shape[2], k_BKTP.shape[2] - q_BHLP.shape[2]
    block = _first_block(length, window)
    end = earlier + block
    y = attend(
        q_BHLP[:, :, :block],
        k_BKTP[:, :, :end],
        v_BKTP[:, :, :end],
        mask=masks.first,
        causal=masks.causal,
    )
    if masks.blocks is None:
        return y
    start = end - (window - 1)  # the first key of the second block
    queries = _blocks(q_BHLP[:, :, block:], block, block)
    keys, values = (_blocks(x[:, :, start:], block + window - 1, block) for x in (k_BKTP, v_BKTP))
    rest = attend(queries, keys, values, mask=masks.blocks)
    batch, heads, _, width = q_BHLP.shape
    rest = rest.view(batch, -1, heads, block, width).transpose(1, 2).reshape(batch, heads, -1, width)
    return torch.cat((y, rest[:, :, : length - block]), dim=2)


def band_masks(
    length: int,
    earlier: int,
    *,
    window: int,
    device: torch.device,
    known_B: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> BandMasks:
    """Return the masks for ``length`` new tokens after ``earlier`` ones.

    Args:
        length: new tokens L, at least 1.
        earlier: earlier tokens S, at most ``window − 1``.
        window: w, tokens that a token attends to.
        device: of the masks.
        known_B: number of the S earlier entries that contain a token, at the end of each row; None: all.
        documents_BT: (B, T) documents of earlier and new tokens; attention stays within a document.

    """
    block = _first_block(length, window)
    query = torch.arange(earlier, earlier + block, device=device)[:, None]
    key = torch.arange(earlier + block, device=device)
    first: Tensor | None = None
    if known_B is None and documents_BT is None:
        # With causal attention or without a mask the kernel need not check each pair.
        if earlier + block > window or (earlier > 0 and block > 1):
            first = ((key <= query) & (key > query - window))[None, None]
    else:
        seen = ((key <= query) & (key > query - window))[None]
        if known_B is not None:
            seen = seen & (key >= earlier - known_B[:, None])[:, None]
        if documents_BT is not None:
            near = documents_BT[:, : earlier + block]
            seen = seen & (near[:, earlier:, None] == near[:, None, :])
        first = seen[:, None]
    blocks = None if block == length else _later_blocks(length, block, window, device, documents_BT)
    return BandMasks(first, causal=first is None and block > 1, blocks=blocks)


def _later_blocks(
    length: int, block: int, window: int, device: torch.device, documents_BT: Tensor | None
) -> Tensor:
    """Return the mask of the blocks after the first; without documents it is the same for all."""
    query = torch.arange(block, device=device)[:, None]
    key = torch.arange(block + window - 1, device=device)
    band = ((key >= query) & (key < query + window))[None, None]
    if documents_BT is None:
        return band
    documents = documents_BT[:, documents_BT.shape[1] - length + block - (window - 1) :, None]
    keys = _blocks(documents[:, None], block + window - 1, block)
    return band & (keys[:, :, window - 1 :] == keys.mT)  # the last C keys of a block belong to its queries


def _first_block(length: int, window: int) -> int:
    """Return the number of queries of the first block: all, unless blocks save work."""
    block = max(window, MINIMUM_BLOCK)
    return block if length > 2 * block else length


def _blocks(x_BHTP: Tensor, size: int, step: int) -> Tensor:
    """Divide T tokens into overlapping blocks, one every ``step``, zero-padded: (B · N, H, size, P)."""
    batch, heads, tokens, width = x_BHTP.shape
    count = -(-(tokens - (size - step)) // step)
    padded = F.pad(x_BHTP, (0, 0, 0, count * step + size - step - tokens))
    blocks = padded.unfold(2, size, step)  # (B, H, N, P, size)
    return blocks.permute(0, 2, 1, 4, 3).reshape(batch * count, heads, size, width)
