"""Attention over given queries, keys and values.

Shape legend: B batch, H query heads, K key and value heads (dividing H), L queries, T keys, P head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend", "attend_reference"]


def attend(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return ``softmax(q k^T / √P) v``, (B, H, L, P).

    ``mask`` (…, L, T) bool says which keys a query sees; ``causal`` (with L = T, without mask) lets it see
    itself and what comes before.
    """
    return scaled_dot_product_attention(
        q_BHLP,
        k_BKTP,
        v_BKTP,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=q_BHLP.shape[1] != k_BKTP.shape[1],
    )


def attend_reference(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return the same as ``attend`` from the same q, k, v, mask and causal, written out: its oracle."""
    group = q_BHLP.shape[1] // k_BKTP.shape[1]
    k, v = k_BKTP.repeat_interleave(group, dim=1), v_BKTP.repeat_interleave(group, dim=1)
    scores = q_BHLP @ k.mT / math.sqrt(q_BHLP.shape[-1])
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v
