"""Attention of one token in each of a few rows to its slot, in one kernel between the projections.

The necessary cost is reading the valid keys and values once. A program processes one head of one row (and a
part of the past, if there are few rows), loads blocks of the past ahead of their use, and exchanges nothing
between threads until the end: each position of a block has its own maximum, sum and result.

Shape legend: S slots, R rows of a step, each in a slot; U projection width, H heads, K key and value heads,
P head width, T maximum tokens (``max_seq_len``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous

PROGRAMS = 264  # programs that occupy a GPU: two per multiprocessor of an H100


class AttentionTiles(NamedTuple):
    """The tiles of attention: tokens of a block, stages, warps, past tokens per program if there are few."""

    block: int
    stages: int
    warps: int
    span: int


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and keys before the rotation: weights (P,), if any, and epsilon."""

    queries_P: Tensor | None
    keys_P: Tensor | None
    eps: float


def attention_tiles(rows: int) -> AttentionTiles:
    """Return the tiles of the attention of this many rows.

    A few programs need many loads in flight each; with many programs one block each suffices.
    """
    return AttentionTiles(256, 1, 8, 256) if rows < 4 else AttentionTiles(32, 3, 2, 1024)


def attention_step(
    projected_RU: Tensor,
    u_SU: Tensor | None,
    rows_R: Tensor,
    lengths_R: Tensor,
    keys_SKTP: Tensor,
    values_SKTP: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    *,
    n_heads: int,
    dtype: torch.dtype,
    key_scales_SKT: Tensor | None = None,
    value_scales_SKT: Tensor | None = None,
    norms: HeadNorms | None = None,
    arrivals_X: Tensor | None = None,
) -> Tensor:
    """Return the attention of one token in each row's slot to itself and earlier tokens, (R, H · P).

    The token's key and value are written after the slot's tokens and become valid once it is committed.

    Args:
        projected_RU: q, k, v, contiguous.
        u_SU: the injection of each slot; None: no injection, or already added.
        rows_R: int64, the slot of each row, all different.
        lengths_R: int64, number of committed tokens of each row's slot.
        keys_SKTP: rotated keys of all slots, P a power of 2.
        values_SKTP: values of all slots.
        cos_TF: cosines of the rotation at each position, F = P / 2.
        sin_TF: sines.
        n_heads: H.
        dtype: type of the result.
        key_scales_SKT: scales of 8-bit keys (`ops.quantization`).
        value_scales_SKT: scales of 8-bit values.
        norms: of queries and keys; None: no norms.
        arrivals_X: as ``arrivals`` returns them; kernels that may run at the same time have their own. None:
            new ones.

    """
    _, kv_heads, room, head_dim = keys_SKTP.shape
    rows, device = len(rows_R), keys_SKTP.device
    out = torch.empty(rows, n_heads * head_dim, dtype=dtype, device=device)
    # A past of few heads is divided among more programs, the last of which joins the results.
    tiles = attention_tiles(rows)
    splits = min(triton.cdiv(room, tiles.span), triton.cdiv(PROGRAMS, n_heads * rows))
    found, sums = out, out
    if splits > 1:
        found = torch.empty(rows * n_heads, splits, head_dim, dtype=torch.float32, device=device)
        sums = torch.empty(2, rows * n_heads, splits, dtype=torch.float32, device=device)
    if arrivals_X is None:
        arrivals_X = arrivals(device)
    with on_device(device):
        _attention_step[(n_heads, rows, splits)](
            projected_RU,
            projected_RU if u_SU is None else u_SU,
            rows_R,
            lengths_R,
            keys_SKTP,
            values_SKTP,
            keys_SKTP if key_scales_SKT is None else key_scales_SKT,
            values_SKTP if value_scales_SKT is None else value_scales_SKT,
            cos_TF,
            sin_TF,
            found,
            sums,
            out,
            arrivals_X,
            projected_RU.shape[1],
            room,
            math.log2(math.e) * head_dim**-0.5,
            *(norms or (None, None, None)),
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            H=n_heads,
            KV=kv_heads,
            P=head_dim,
            HAS_U=u_SU is not None,
            SCALED=key_scales_SKT is not None,
            BLOCK_T=tiles.block,
            STAGES=tiles.stages,
            FIRST=rows < 4,
            **overlapping(device),
            num_warps=tiles.warps,
        )
    return out


def arrivals(device: torch.device) -> Tensor:
    """Return counters of programs that have ended, which the last of them sets to 0 again."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


@triton.jit
def is_last(arrival_ptr, count: tl.constexpr):
    """Whether this program is the last of ``count`` ones that call this; it sees what they have written."""
    tl.debug_barrier()  # the stores of all threads are before the one that counts
    last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrival_ptr, 0)
    return last


@triton.jit
def joined(found_ptr, sums_ptr, first, count, SPLITS: tl.constexpr, P: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the result (P,) of SPLITS parts, from ``first`` on, each with a maximum and a sum of weights."""
    split, whole = tl.arange(0, BLOCK_S), tl.arange(0, P)
    real = split < SPLITS
    # Other programs have written these: not from this multiprocessor's own cache.
    largest = tl.load(sums_ptr + first + split, mask=real, other=float("-inf"), cache_modifier=".cg")
    weights = tl.load(sums_ptr + count + first + split, mask=real, other=0.0, cache_modifier=".cg")
    share = tl.exp2(largest - tl.max(largest, axis=0))
    place = found_ptr + (first + split[:, None]) * P + whole[None, :]
    parts = tl.load(place, mask=real[:, None], other=0.0, cache_modifier=".cg")
    return tl.sum(parts * share[:, None], axis=0) / tl.sum(weights * share, axis=0)


@triton.jit
def _load_sum(p_ptr, u_ptr, place, HAS_U: tl.constexpr):
    value = tl.load(p_ptr + place).to(tl.float32)
    if HAS_U:
        value += tl.load(u_ptr + place).to(tl.float32)
    return value


@triton.jit
def weighted(cos, sin, norm_ptr, whole, partner):
    """Return cosines and sines (…, P) times the weights of a norm before the rotation, if it has any."""
    if norm_ptr is not None:
        # Loaded in the shape of the tables: with another layout registers of the loop are spilled.
        cos *= tl.load(norm_ptr + tl.broadcast_to(whole, cos.shape)).to(tl.float32)
        sin *= tl.load(norm_ptr + tl.broadcast_to(partner, cos.shape)).to(tl.float32)
    return cos, sin


@triton.jit
def _rotated(p_ptr, u_ptr, first, whole, partner, cos, sin, HAS_U: tl.constexpr, EPS: tl.constexpr):
    value = _load_sum(p_ptr, u_ptr, first + whole, HAS_U)
    rotated = value * cos
    rotated += _load_sum(p_ptr, u_ptr, first + partner, HAS_U) * sin
    if EPS is not None:
        rotated *= tl.rsqrt(tl.sum(value * value) / whole.shape[0] + EPS)
    return rotated


@triton.jit
def _scale(x):
    return tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30) / 127


@triton.jit
def _attend(key, value, key_scale, value_scale, before, q, largest, weights, y, SCALED: tl.constexpr):
    """Return the largest score, the sum of weights and of values of each position after one more block."""
    score = tl.sum(key.to(tl.float32) * q[None, :], axis=1)
    if SCALED:
        score *= key_scale
    score = tl.where(before, score, float("-inf"))
    new = tl.maximum(largest, score)
    share, kept = tl.exp2(score - new), tl.exp2(largest - new)
    weights = weights * kept + share
    if SCALED:
        share *= value_scale
    return new, weights, y * kept[:, None] + value.to(tl.float32) * share[:, None]


@triton.jit
def _attention_step(
    p_ptr, u_ptr, rows_ptr, lengths_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, cos_ptr,
    sin_ptr, found_ptr, sums_ptr, out_ptr, arrivals_ptr, U, T, scale, q_norm_ptr, k_norm_ptr,
    EPS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, H: tl.constexpr, KV: tl.constexpr,
    P: tl.constexpr, HAS_U: tl.constexpr, SCALED: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    F: tl.constexpr = P // 2
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    slot = tl.load(rows_ptr + row)
    length = tl.load(lengths_ptr + row)
    shared = head // (H // KV)
    p_ptr += row * U
    u_ptr += slot * U
    first_token = (slot * KV + shared) * T
    base = first_token * P
    kind = keys_ptr.dtype.element_ty
    whole, place = tl.arange(0, P), tl.arange(0, BLOCK_T)
    # Feature i is rotated with i + F: whole vectors, with the partners loaded separately.
    partner = (whole + F) % P
    cos = tl.load(cos_ptr + length * F + whole % F).to(tl.float32)
    sin = tl.load(sin_ptr + length * F + whole % F).to(tl.float32)
    sin = tl.where(whole < F, -sin, sin)
    k_cos, k_sin = weighted(cos, sin, k_norm_ptr, whole, partner)
    cos, sin = weighted(cos, sin, q_norm_ptr, whole, partner)
    begin, end = length * 0, length
    if SPLITS > 1:
        span = tl.cdiv(length, SPLITS)
        begin, end = split * span, tl.minimum(length, (split + 1) * span)
    if FIRST:  # the past is that of earlier calls; the token's own vectors are the previous kernel's
        before = begin + place < end
        here = base + (begin + place)[:, None] * P + whole[None, :]
        first_keys = tl.load(keys_ptr + here, mask=before[:, None], other=0)
        first_values = tl.load(values_ptr + here, mask=before[:, None], other=0)
    wait_for_previous(PDL)
    first_q, first_k = head * P, (H + shared) * P
    q = _rotated(p_ptr, u_ptr, first_q, whole, partner, cos, sin, HAS_U, EPS) * scale
    k = _rotated(p_ptr, u_ptr, first_k, whole, partner, k_cos, k_sin, HAS_U, EPS)
    v = _load_sum(p_ptr, u_ptr, (H + KV + shared) * P + whole, HAS_U)
    writes = (head % (H // KV) == 0) & (split == 0)
    if SCALED:
        # The token uses its own unquantized: a search could not get below the rounding error.
        if writes:
            own_key_scale, own_value_scale = _scale(k), _scale(v)
            tl.store(key_scales_ptr + first_token + length, own_key_scale)
            tl.store(value_scales_ptr + first_token + length, own_value_scale)
            tl.store(keys_ptr + base + length * P + whole, tl.floor(k / own_key_scale + 0.5).to(kind))
            tl.store(values_ptr + base + length * P + whole, tl.floor(v / own_value_scale + 0.5).to(kind))
    else:
        if writes:
            tl.store(keys_ptr + base + length * P + whole, k.to(kind))
            tl.store(values_ptr + base + length * P + whole, v.to(kind))
        k, v = k.to(kind).to(tl.float32), v.to(kind).to(tl.float32)  # rounded as they will be read
    own = tl.sum(q * k)
    largest = tl.full((BLOCK_T,), 0.0, tl.float32) + own
    weights = tl.zeros((BLOCK_T,), tl.float32)
    y = tl.zeros((BLOCK_T, P), tl.float32)
    if FIRST:
        key_scale, value_scale = largest * 0 + 1, largest * 0 + 1
        if SCALED:
            key_scale = tl.load(key_scales_ptr + first_token + begin + place, mask=before, other=0.0)
            value_scale = tl.load(value_scales_ptr + first_token + begin + place, mask=before, other=0.0)
        largest, weights, y = _attend(
            first_keys, first_values, key_scale, value_scale, before, q, largest, weights, y, SCALED
        )
        begin += BLOCK_T
    for first in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        before = first + place < end
        here = base + (first + place)[:, None] * P + whole[None, :]
        key = tl.load(keys_ptr + here, mask=before[:, None], other=0)
        value = tl.load(values_ptr + here, mask=before[:, None], other=0)
        key_scale, value_scale = largest, largest
        if SCALED:
            key_scale = tl.load(key_scales_ptr + first_token + first + place, mask=before, other=0.0)
            value_scale = tl.load(value_scales_ptr + first_token + first + place, mask=before, other=0.0)
        largest, weights, y = _attend(
            key, value, key_scale, value_scale, before, q, largest, weights, y, SCALED
        )
    most = tl.max(largest, axis=0)
    kept = tl.exp2(largest - most)
    itself = tl.exp2(own - most)  # the token itself belongs to the first program
    if SPLITS > 1:
        itself = tl.where(split == 0, itself, 0.0)
    total = tl.sum(weights * kept) + itself
    found = tl.sum(y * kept[:, None], axis=0) + v * itself
    out_ptr += (row * H + head) * P
    if SPLITS == 1:
        tl.store(out_ptr + whole, (found / total).to(out_ptr.dtype.element_ty))
    else:
        first_part = (row * H + head) * SPLITS
        count = tl.num_programs(1) * H * SPLITS
        tl.store(found_ptr + (first_part + split) * P + whole, found)
        tl.store(sums_ptr + first_part + split, most)
        tl.store(sums_ptr + count + first_part + split, total)
        if is_last(arrivals_ptr + row * H + head, SPLITS):
            whole_y = joined(found_ptr, sums_ptr, first_part, count, SPLITS, P, BLOCK_S)
            tl.store(out_ptr + whole, whole_y.to(out_ptr.dtype.element_ty))
