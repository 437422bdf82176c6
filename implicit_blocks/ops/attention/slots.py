"""Attention of one query per row to the keys of its slot in a shared buffer, each with its own length.

Shape legend: S slots, R of them in a step, H query heads, K key and value heads (dividing H), C maximum
tokens (``max_seq_len``), P head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from implicit_blocks.ops.backends import note
from implicit_blocks.ops.quantization import EightBits

__all__ = ["BACKENDS", "attend_slot_windows", "attend_slots"]


def attend_slots(
    q_RHP: Tensor,
    keys_SKCP: Tensor,
    values_SKCP: Tensor,
    *,
    rows_R: Tensor | None,
    lengths_R: Tensor,
    key_scales_SKC: Tensor | None = None,
    value_scales_SKC: Tensor | None = None,
    own_keys_RKP: Tensor | None = None,
    own_values_RKP: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return ``softmax(q k^T / √P) v`` over the first ``lengths_R`` keys of each row's slot, (R, H, P).

    Args:
        q_RHP: one query per row.
        keys_SKCP: keys of all slots, read in place.
        values_SKCP: values of all slots.
        rows_R: int64, the slots of the rows, all different; None: all slots in order.
        lengths_R: int64, number of valid keys, at least 1.
        key_scales_SKC: scales of 8-bit keys, which are dequantized first.
        value_scales_SKC: scales of 8-bit values.
        own_keys_RKP: with 8-bit keys, the last valid key of each row before quantization, which is used
            unquantized. A search that quantized it in every iteration could not get below the quantization
            error.
        own_values_RKP: the last value, likewise.
        backend: ``each`` processes one slot after the other and reads valid keys only; ``masked`` processes
            all slots together, including idle ones, up to ``max_seq_len``, in a fixed number of kernels.
            None: ``each`` on a CPU, else ``masked``.

    Raises:
        ValueError: the backend is unknown.

    """
    if backend is None:
        backend = "each" if q_RHP.device.type == "cpu" else "masked"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(sorted(BACKENDS))}")
    note("attention in slots", f"sdpa, {backend}")
    keys = _Kept(keys_SKCP, key_scales_SKC, own_keys_RKP)
    values = _Kept(values_SKCP, value_scales_SKC, own_values_RKP)
    return BACKENDS[backend](q_RHP, keys, values, rows_R, lengths_R)


def attend_slot_windows(
    q_RHLP: Tensor,
    keys_SKCP: Tensor,
    values_SKCP: Tensor,
    *,
    rows_R: Tensor | None,
    lengths_R: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Attend from windows of L tokens that follow ``lengths_R`` tokens of each row's slot, (R, H, L, P).

    The keys and values of a window's own tokens are already in the slot, and each token attends up to its
    own.

    Args:
        q_RHLP: the queries of each row's window.
        keys_SKCP: keys of all slots, read in place.
        values_SKCP: values of all slots.
        rows_R: int64, the slots of the rows, all different; None: all slots in order.
        lengths_R: int64, number of tokens before each window.
        backend: ``each`` or ``masked``, as in ``attend_slots``; None: by device.

    """
    if backend is None:
        backend = "each" if q_RHLP.device.type == "cpu" else "masked"
    note("attention in slots", f"sdpa, {backend}")
    length, grouped = q_RHLP.shape[2], q_RHLP.shape[1] != keys_SKCP.shape[1]
    order = torch.arange(length, device=q_RHLP.device)[:, None]
    if backend == "masked":
        keys, values = (kept if rows_R is None else kept[rows_R] for kept in (keys_SKCP, values_SKCP))
        places = torch.arange(keys.shape[2], device=keys.device)
        mask = places <= (lengths_R[:, None, None] + order)[:, None]
        return scaled_dot_product_attention(
            q_RHLP, keys.to(q_RHLP.dtype), values.to(q_RHLP.dtype), attn_mask=mask, enable_gqa=grouped
        )
    slots = range(len(q_RHLP)) if rows_R is None else rows_R.tolist()
    found = []
    for row, (slot, before) in enumerate(zip(slots, lengths_R.tolist(), strict=True)):
        end = before + length
        found.append(
            scaled_dot_product_attention(
                q_RHLP[row, None],
                keys_SKCP[slot : slot + 1, :, :end],
                values_SKCP[slot : slot + 1, :, :end],
                attn_mask=torch.arange(end) <= before + order,
                enable_gqa=grouped,
            )
        )
    return torch.cat(found) if len(found) > 1 else found[0]


class _Kept(NamedTuple):
    whole: Tensor
    scales: Tensor | None
    own_RKP: Tensor | None

    def of(self, row: int, slot: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return the valid entries of a row's slot, (1, K, length, P)."""
        part = self.whole[slot : slot + 1, :, :length]
        if self.scales is None:
            return part
        part = EightBits(part, self.scales[slot : slot + 1, :, :length]).wide(dtype)
        if self.own_RKP is not None:
            part[0, :, -1] = self.own_RKP[row]
        return part

    def of_all(self, rows: Tensor | None, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the entries of all slots, including invalid ones."""
        if self.scales is None:
            return self.whole
        wide = EightBits(self.whole, self.scales).wide(dtype)
        if self.own_RKP is not None:
            slots = torch.arange(len(wide), device=wide.device) if rows is None else rows
            wide[slots, :, lengths - 1] = self.own_RKP.to(dtype)
        return wide


def _each(q: Tensor, keys: _Kept, values: _Kept, rows: Tensor | None, lengths: Tensor) -> Tensor:
    slots = range(len(q)) if rows is None else rows.tolist()
    grouped = q.shape[1] != keys.whole.shape[1]
    found = [
        scaled_dot_product_attention(
            q[row, None, :, None],
            keys.of(row, slot, length, q.dtype),
            values.of(row, slot, length, q.dtype),
            enable_gqa=grouped,
        )
        for row, (slot, length) in enumerate(zip(slots, lengths.tolist(), strict=True))
    ]
    return torch.cat(found)[:, :, 0]


def _masked(q: Tensor, keys: _Kept, values: _Kept, rows: Tensor | None, lengths: Tensor) -> Tensor:
    room, dtype = keys.whole.shape, q.dtype
    seen = keys.of_all(rows, lengths, dtype), values.of_all(rows, lengths, dtype)
    if rows is not None:  # scatter queries and lengths to slots instead of gathering slots
        q = q.new_zeros(room[0], *q.shape[1:]).index_copy(0, rows, q)
        lengths = lengths.new_ones(room[0]).index_copy(0, rows, lengths)
    counts = torch.arange(room[2], device=q.device) < lengths[:, None]
    found = scaled_dot_product_attention(
        q[:, :, None],
        *seen,
        attn_mask=counts[:, None, None],
        enable_gqa=q.shape[1] != room[1],
    )[:, :, 0]
    return found if rows is None else found[rows]


BACKENDS = {"each": _each, "masked": _masked}
