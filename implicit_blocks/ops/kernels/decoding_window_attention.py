"""Attention of windows of a few tokens in each of a few rows to their slots, in one kernel.

The queries of all tokens of a window, and of all heads that share keys, are the rows of one small matrix, so
that keys and values are read once. The window's own keys are taken from the projection, one after the other:
a query selects those up to its token, because values of later tokens may not be finite.

Shape legend: S slots, R rows of a call, each in a slot; L tokens of a window, T = R · L tokens of a call, row
by row; U projection width, H heads, K key and value heads, P head width, C maximum tokens (``max_seq_len``).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding_attention import PROGRAMS, SPAN, _join
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous

LEAST = 16  # width of a head, and rows of a product of matrix units


def attention_window(
    projected_TU: Tensor,
    rows_R: Tensor,
    lengths_R: Tensor,
    keys_SKCP: Tensor,
    values_SKCP: Tensor,
    cos_CF: Tensor,
    sin_CF: Tensor,
    *,
    length: int,
    n_heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the attention of each token to its slot and to its window up to itself, (T, H · P).

    The keys and values of the window are written after the slot's tokens and become valid once committed.

    Args:
        projected_TU: q, k, v, float32, contiguous.
        rows_R: int64, the slot of each row, all different.
        lengths_R: int64, number of committed tokens of each row's slot.
        keys_SKCP: rotated keys of all slots, P a power of 2 and at least 16.
        values_SKCP: values of all slots.
        cos_CF: cosines of the rotation at each position, F = P / 2.
        sin_CF: sines.
        length: L.
        n_heads: H.
        dtype: type of the result.

    """
    _, kv_heads, room, head_dim = keys_SKCP.shape
    rows, device = len(rows_R), keys_SKCP.device
    tokens = rows * length
    out = torch.empty(tokens, n_heads * head_dim, dtype=dtype, device=device)
    # A long past of few heads is divided among more programs, whose results are joined.
    splits = min(triton.cdiv(room, SPAN), triton.cdiv(PROGRAMS, kv_heads * rows))
    found, sums = out, out
    if splits > 1:
        found = torch.empty(tokens * n_heads, splits, head_dim, dtype=torch.float32, device=device)
        sums = torch.empty(2, tokens * n_heads, splits, dtype=torch.float32, device=device)
    half = keys_SKCP.dtype.itemsize <= 2
    with on_device(device):
        _attention_window[(kv_heads, rows, splits)](
            projected_TU,
            rows_R,
            lengths_R,
            keys_SKCP,
            values_SKCP,
            cos_CF,
            sin_CF,
            found,
            sums,
            projected_TU.shape[1],
            room,
            math.log2(math.e) * head_dim**-0.5,
            SPLITS=splits,
            H=n_heads,
            KV=kv_heads,
            P=head_dim,
            L=length,
            PRECISION="tf32" if half else "ieee",  # of float32 operands alone
            BLOCK_L=triton.next_power_of_2(length),
            BLOCK_Q=max(LEAST, triton.next_power_of_2(n_heads // kv_heads * length)),
            BLOCK_T=128 if half and head_dim <= 128 else 32,
            STAGES=2,
            **overlapping(device),
            num_warps=8 if half else 4,
        )
        if splits > 1:
            block, count = triton.next_power_of_2(splits), tokens * n_heads
            _join[(count,)](found, sums, out, count, splits, P=head_dim, BLOCK=block, **overlapping(device))
    return out


@triton.jit
def _rotated(p_ptr, at, cos, sin, partner, mask, P: tl.constexpr):
    value = tl.load(p_ptr + at[:, None] + tl.arange(0, P)[None, :], mask=mask[:, None], other=0.0)
    other = tl.load(p_ptr + at[:, None] + partner[None, :], mask=mask[:, None], other=0.0)
    return value * cos + other * sin


@triton.jit
def _attention_window(
    p_ptr,
    rows_ptr,
    lengths_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    sums_ptr,
    U,
    C,
    scale,
    SPLITS: tl.constexpr,
    H: tl.constexpr,
    KV: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_for_previous(PDL)
    F: tl.constexpr = P // 2
    GROUP: tl.constexpr = H // KV
    shared = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    slot = tl.load(rows_ptr + row)
    length = tl.load(lengths_ptr + row)
    p_ptr += row * L * U
    base = (slot * KV + shared) * C * P
    kind = keys_ptr.dtype.element_ty
    query, whole, place = tl.arange(0, BLOCK_Q), tl.arange(0, P), tl.arange(0, BLOCK_T)
    number = query % L  # of the token in its window
    head = shared * GROUP + query // L
    used = query < GROUP * L
    # Feature i is rotated with i + F: whole vectors, with the partners loaded separately.
    partner = (whole + F) % P
    sign = tl.where(whole < F, -1.0, 1.0)
    angle = (length + number)[:, None] * F + (whole % F)[None, :]
    inside = (used & (length + number < C))[:, None]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32) * sign[None, :]
    q = _rotated(p_ptr, number * U + head * P, cos, sin, partner, used, P)
    # The window's own keys: loaded together, and written before any of them is used.
    token = tl.arange(0, BLOCK_L)
    fits = (token < L) & (length + token < C)
    angle = (length + token)[:, None] * F + (whole % F)[None, :]
    cos = tl.load(cos_ptr + angle, mask=fits[:, None], other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=fits[:, None], other=0.0).to(tl.float32) * sign[None, :]
    line = token * U + (H + shared) * P
    keys = _rotated(p_ptr, line, cos, sin, partner, fits, P).to(kind)
    values = tl.load(p_ptr + line[:, None] + (KV * P + whole)[None, :], mask=fits[:, None], other=0.0).to(
        kind
    )
    if split == 0:
        target = base + (length + token)[:, None] * P + whole[None, :]
        tl.store(keys_ptr + target, keys, mask=fits[:, None])
        tl.store(values_ptr + target, values, mask=fits[:, None])
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_Q,), tl.float32)
    y = tl.zeros((BLOCK_Q, P), tl.float32)
    for own in tl.static_range(L):
        this = (token == own)[:, None]
        k = tl.sum(tl.where(this, keys.to(tl.float32), 0.0), axis=0)  # rounded as they will be read
        v = tl.sum(tl.where(this, values.to(tl.float32), 0.0), axis=0)
        seen = number >= own
        score = tl.where(seen, tl.sum(q * k[None, :], axis=1) * scale, float("-inf"))
        new = tl.maximum(largest, score)
        share, kept = tl.exp2(score - new), tl.exp2(largest - new)
        weights = weights * kept + share
        y = y * kept[:, None] + tl.where(seen[:, None], v[None, :] * share[:, None], 0.0)
        largest = new
    if SPLITS > 1:  # the window belongs to the first program
        weights = tl.where(split == 0, weights, 0.0)
        y = tl.where(split == 0, y, 0.0)
    begin, end = length * 0, length
    if SPLITS > 1:
        span = tl.cdiv(length, SPLITS)
        begin, end = split * span, tl.minimum(length, (split + 1) * span)
    rounded = q.to(kind)
    for first in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        before = first + place < end
        here = base + (first + place)[:, None] * P + whole[None, :]
        key = tl.load(keys_ptr + here, mask=before[:, None], other=0.0)
        value = tl.load(values_ptr + here, mask=before[:, None], other=0.0)
        scores = tl.dot(rounded, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(before[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, axis=1))
        shares, kept = tl.exp2(scores - new[:, None]), tl.exp2(largest - new)
        weights = weights * kept + tl.sum(shares, axis=1)
        y = tl.dot(shares.to(kind), value, y * kept[:, None], input_precision=PRECISION)
        largest = new
    index = (row * L + number) * H + head
    if SPLITS == 1:
        y = y / weights[:, None]
        target = out_ptr + index[:, None] * P + whole[None, :]
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=used[:, None])
    else:
        at = index * SPLITS + split
        tl.store(out_ptr + at[:, None] * P + whole[None, :], y, mask=used[:, None])
        tl.store(sums_ptr + at, largest, mask=used)
        total = tl.num_programs(1) * L * H * SPLITS
        tl.store(sums_ptr + total + at, weights, mask=used)
