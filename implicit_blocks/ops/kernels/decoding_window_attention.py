"""Attention of windows of a few tokens in each of a few rows to their slots, in one kernel.

The queries of all tokens of a window, and of all heads that share keys, are the rows of one small matrix, so
that keys and values are read once. The window's own keys are taken from the projection, as one more block, of
which a query sees those up to its token. Because 0 · NaN is NaN, a value that is not finite is replaced by 0,
so that earlier tokens do not see it, and the key of its token by NaN, for the tokens that do.

Shape legend: S slots, R rows of a call, each in a slot; L tokens of a window, T = R · L tokens of a call, row
by row; U projection width, H heads, K key and value heads, P head width, C maximum tokens (``max_seq_len``).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding_attention import (
    PROGRAMS,
    AttentionTiles,
    HeadNorms,
    arrivals,
    is_last,
    weighted,
)
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous

LEAST = 16  # width of a head, rows of a product of matrix units, and tokens of a window, with unused ones


def window_attention_tiles(head_dim: int, queries: int, *, half: bool) -> AttentionTiles:
    """Return the tiles of the attention of windows; ``half`` for keys of at most 16 bits."""
    if half and head_dim <= 64:
        return AttentionTiles(128, 2, 4, 128) if queries <= LEAST else AttentionTiles(256, 2, 8, 256)
    return AttentionTiles(128 if half and head_dim <= 128 else 32, 2, 8 if half else 4, 128)


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
    norms: HeadNorms | None = None,
    arrivals_X: Tensor | None = None,
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
        norms: of queries and keys; None: no norms.
        arrivals_X: as ``arrivals`` returns them; kernels that may run at the same time have their own. None:
            new ones.

    """
    _, kv_heads, room, head_dim = keys_SKCP.shape
    rows, device = len(rows_R), keys_SKCP.device
    tokens = rows * length
    out = torch.empty(tokens, n_heads * head_dim, dtype=dtype, device=device)
    # A past of few heads is divided among more programs, the last of which joins the results.
    half = keys_SKCP.dtype.itemsize <= 2
    queries = n_heads // kv_heads * length
    tiles = window_attention_tiles(head_dim, queries, half=half)
    splits = min(triton.cdiv(room, tiles.span), triton.cdiv(PROGRAMS, kv_heads * rows))
    found, sums = out, out
    if splits > 1:
        found = torch.empty(tokens * n_heads, splits, head_dim, dtype=torch.float32, device=device)
        sums = torch.empty(2, tokens * n_heads, splits, dtype=torch.float32, device=device)
    if arrivals_X is None:
        arrivals_X = arrivals(device)
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
            out,
            arrivals_X,
            projected_TU.shape[1],
            room,
            math.log2(math.e) * head_dim**-0.5,
            *(norms or (None, None, None)),
            SPLITS=splits,
            H=n_heads,
            KV=kv_heads,
            P=head_dim,
            L=length,
            PRECISION="tf32" if half else "ieee",  # of float32 operands alone
            BLOCK_L=max(LEAST, triton.next_power_of_2(length)),
            BLOCK_Q=max(LEAST, triton.next_power_of_2(queries)),
            BLOCK_T=tiles.block,
            STAGES=tiles.stages,
            **overlapping(device),
            num_warps=tiles.warps,
        )
    return out


@triton.jit
def _rotated(p_ptr, at, cos, sin, partner, mask, P: tl.constexpr, EPS: tl.constexpr):
    value = tl.load(p_ptr + at[:, None] + tl.arange(0, P)[None, :], mask=mask[:, None], other=0.0)
    other = tl.load(p_ptr + at[:, None] + partner[None, :], mask=mask[:, None], other=0.0)
    rotated = value * cos + other * sin
    if EPS is not None:
        rotated *= tl.rsqrt(tl.sum(value * value, axis=1) / P + EPS)[:, None]
    return rotated


@triton.jit
def _scores(q, key, seen, scale, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _attention_window(
    p_ptr, rows_ptr, lengths_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, found_ptr, sums_ptr, out_ptr,
    arrivals_ptr, U, C, scale, q_norm_ptr, k_norm_ptr, EPS: tl.constexpr, SPLITS: tl.constexpr, H:
    tl.constexpr, KV: tl.constexpr, P: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr, BLOCK_L:
    tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
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
    cos, sin = weighted(cos, sin, q_norm_ptr, whole[None, :], partner[None, :])
    begin, end = length * 0, length
    if SPLITS > 1:
        span = tl.cdiv(length, SPLITS)
        begin, end = split * span, tl.minimum(length, (split + 1) * span)
    # The past is that of earlier calls; the window's own vectors are the previous kernel's.
    before = begin + place < end
    here = base + (begin + place)[:, None] * P + whole[None, :]
    first_keys = tl.load(keys_ptr + here, mask=before[:, None], other=0.0)
    first_values = tl.load(values_ptr + here, mask=before[:, None], other=0.0)
    wait_for_previous(PDL)
    q = _rotated(p_ptr, number * U + head * P, cos, sin, partner, used, P, EPS)
    # The window's own keys: loaded together, and written before any of them is used.
    token = tl.arange(0, BLOCK_L)
    fits = (token < L) & (length + token < C)
    angle = (length + token)[:, None] * F + (whole % F)[None, :]
    cos = tl.load(cos_ptr + angle, mask=fits[:, None], other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=fits[:, None], other=0.0).to(tl.float32) * sign[None, :]
    cos, sin = weighted(cos, sin, k_norm_ptr, whole[None, :], partner[None, :])
    line = token * U + (H + shared) * P
    keys = _rotated(p_ptr, line, cos, sin, partner, fits, P, EPS).to(kind)
    values = tl.load(p_ptr + line[:, None] + (KV * P + whole)[None, :], mask=fits[:, None], other=0.0).to(
        kind
    )
    if split == 0:
        target = base + (length + token)[:, None] * P + whole[None, :]
        tl.store(keys_ptr + target, keys, mask=fits[:, None])
        tl.store(values_ptr + target, values, mask=fits[:, None])
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    wrong = tl.max((finite == 0).to(tl.int32), axis=1) > 0
    keys = tl.where(wrong[:, None], float("nan"), keys)
    values = tl.where(finite, values, 0.0)
    q = q.to(kind)
    # The first block of the past and the window itself, which belongs to the first program, in one step.
    # A query without any token yet keeps its sums of 0.
    own = _scores(q, keys, (number[:, None] >= token[None, :]) & (split == 0), scale, PRECISION)
    scores = _scores(q, first_keys, before[None, :], scale, PRECISION)
    largest = tl.maximum(tl.maximum(tl.max(own, axis=1), tl.max(scores, axis=1)), -1e30)
    own, scores = tl.exp2(own - largest[:, None]), tl.exp2(scores - largest[:, None])
    weights = tl.sum(own, axis=1) + tl.sum(scores, axis=1)
    y = tl.dot(own.to(kind), values, input_precision=PRECISION)
    y = tl.dot(scores.to(kind), first_values, y, input_precision=PRECISION)
    for first in tl.range(begin + BLOCK_T, end, BLOCK_T, num_stages=STAGES):
        before = first + place < end
        here = base + (first + place)[:, None] * P + whole[None, :]
        key = tl.load(keys_ptr + here, mask=before[:, None], other=0.0)
        value = tl.load(values_ptr + here, mask=before[:, None], other=0.0)
        scores = _scores(q, key, before[None, :], scale, PRECISION)
        new = tl.maximum(largest, tl.max(scores, axis=1))
        scores, kept = tl.exp2(scores - new[:, None]), tl.exp2(largest - new)
        weights = weights * kept + tl.sum(scores, axis=1)
        y = tl.dot(scores.to(kind), value, y * kept[:, None], input_precision=PRECISION)
        largest = new
    index = (row * L + number) * H + head
    target = out_ptr + index[:, None] * P + whole[None, :]
    if SPLITS > 1:
        count = tl.num_programs(1) * L * H * SPLITS
        at = index * SPLITS + split
        tl.store(found_ptr + at[:, None] * P + whole[None, :], y, mask=used[:, None])
        tl.store(sums_ptr + at, largest, mask=used)
        tl.store(sums_ptr + count + at, weights, mask=used)
        if is_last(arrivals_ptr + row * KV + shared, SPLITS):
            # Other programs have written these: not from this multiprocessor's own cache.
            most = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
            for part in tl.static_range(SPLITS):
                one = sums_ptr + index * SPLITS + part
                most = tl.maximum(most, tl.load(one, mask=used, other=0.0, cache_modifier=".cg"))
            sums, whole_y = tl.zeros_like(weights), tl.zeros_like(y)
            for part in tl.static_range(SPLITS):
                one = index * SPLITS + part
                part_largest = tl.load(sums_ptr + one, mask=used, other=0.0, cache_modifier=".cg")
                part_weights = tl.load(sums_ptr + count + one, mask=used, other=1.0, cache_modifier=".cg")
                parts = found_ptr + one[:, None] * P + whole[None, :]
                part_y = tl.load(parts, mask=used[:, None], other=0.0, cache_modifier=".cg")
                part_share = tl.exp2(part_largest - most)
                sums += part_weights * part_share
                whole_y += part_y * part_share[:, None]
            tl.store(target, (whole_y / sums[:, None]).to(out_ptr.dtype.element_ty), mask=used[:, None])
    else:
        tl.store(target, (y / weights[:, None]).to(out_ptr.dtype.element_ty), mask=used[:, None])
