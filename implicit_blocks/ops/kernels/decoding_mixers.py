"""Mixers of one token in each of a few rows: all between their projections in one kernel.

Shape legend: S lanes, R rows of a step, each in a lane; U projection width, I inner width, C convolved
channels, W taps, H heads, K key and value heads, P head width, G groups, N state width, T room for tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding import (
    Mamba2Inputs,
    mamba2_history,
    mamba2_prepared,
    on_device,
)

SPAN = 1024  # tokens of the past that a program takes by itself
PROGRAMS = 264  # of attention that keep a card busy: two a multiprocessor of an H100


def prepare_mamba2(projected_RU: Tensor, u_SU: Tensor | None, rows_R: Tensor, inputs: Mamba2Inputs) -> Tensor:
    """Return ``[silu(gate), x, B, C, softplus(dt)]``, (R, U) float32, of one token in each row's lane.

    ``x, B, C`` are convolved, with SiLU. The token's inputs of the convolution are written to their slot.

    Args:
        projected_RU: gate, x, B, C, dt, contiguous.
        u_SU: the injection of each lane, or None.
        rows_R: int64, the lane of each row, all different.
        inputs: of the convolution, and the bias of dt.

    """
    rows, width = projected_RU.shape
    out = torch.empty(rows, width, dtype=torch.float32, device=projected_RU.device)
    with on_device(out.device):
        _prepare_mamba2[(triton.cdiv(width, 512), rows)](
            projected_RU,
            projected_RU if u_SU is None else u_SU,
            rows_R,
            out,
            width,
            *inputs.pointers(),
            HAS_U=u_SU is not None,
            W=inputs.taps,
            HAS_BIAS=inputs.conv_bias_C is not None,
            BLOCK=512,
            num_warps=4,
        )
    return out


def scan_step(
    prepared_RU: Tensor,
    rows_R: Tensor,
    committing_R: Tensor,
    h_SHPN: Tensor,
    *,
    A_log_H: Tensor,
    D_H: Tensor,
    groups: int,
) -> Tensor:
    """Return ``y · silu(gate)``, (R, I) float32, of one token in each row's lane.

    Args:
        prepared_RU: what ``prepare_mamba2`` returns.
        rows_R: int64, the lane of each row, all different.
        committing_R: bool, which rows commit: their ``h`` is replaced. Nobody else's is written.
        h_SHPN: states, P and N powers of 2.
        A_log_H: ``log(−A)``.
        D_H: the skip connection.
        groups: of heads that share B and C.

    """
    _, heads, head_dim, d_state = h_SHPN.shape
    rows = len(rows_R)
    out = torch.empty(rows, heads * head_dim, dtype=torch.float32, device=h_SHPN.device)
    part = min(head_dim, 16 if rows < 4 else 32 if rows < 16 else 64)
    with on_device(out.device):
        _scan_step[(heads * (head_dim // part), rows)](
            prepared_RU,
            rows_R,
            committing_R.view(torch.int8),
            h_SHPN,
            A_log_H,
            D_H,
            out,
            prepared_RU.shape[1],
            H=heads,
            P=head_dim,
            N=d_state,
            G=groups,
            BLOCK_P=part,
            num_warps=4,
        )
    return out


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
) -> Tensor:
    """Return attention of one token in each row's lane to itself and those before it, (R, H · P).

    Its key and value are written behind the lane's tokens, where they count once it is committed.

    Args:
        projected_RU: q, k, v, contiguous.
        u_SU: the injection of each lane; None: there is none, or it has been added.
        rows_R: int64, the lane of each row, all different.
        lengths_R: int64, tokens that each row's lane has committed.
        keys_SKTP: rotated keys of all lanes, P a power of 2.
        values_SKTP: values of all lanes.
        cos_TF: cosines of the rotation at each position, F = P / 2.
        sin_TF: sines.
        n_heads: H.
        dtype: of the result.

    """
    _, kv_heads, room, head_dim = keys_SKTP.shape
    rows, device = len(rows_R), keys_SKTP.device
    out = torch.empty(rows, n_heads * head_dim, dtype=dtype, device=device)
    # A long past of few heads is shared out among more programs, and what they found is joined.
    splits = min(triton.cdiv(room, SPAN), triton.cdiv(PROGRAMS, n_heads * rows))
    found, sums = out, out
    if splits > 1:
        found = torch.empty(rows * n_heads, splits, head_dim, dtype=torch.float32, device=device)
        sums = torch.empty(2, rows * n_heads, splits, dtype=torch.float32, device=device)
    with on_device(device):
        _attention_step[(n_heads, rows, splits)](
            projected_RU,
            projected_RU if u_SU is None else u_SU,
            rows_R,
            lengths_R,
            keys_SKTP,
            values_SKTP,
            cos_TF,
            sin_TF,
            found,
            sums,
            projected_RU.shape[1],
            room,
            head_dim**-0.5,
            SPLITS=splits,
            H=n_heads,
            KV=kv_heads,
            P=head_dim,
            HAS_U=u_SU is not None,
            # Few programs must each have much on its way; many do together.
            BLOCK_T=256 if rows < 4 else 64,
            num_warps=8 if rows < 4 else 4,
        )
        if splits > 1:
            block = triton.next_power_of_2(splits)
            _join[(rows * n_heads,)](found, sums, out, rows * n_heads, splits, P=head_dim, BLOCK=block)
    return out


@triton.jit
def _load_sum(p_ptr, u_ptr, place, HAS_U: tl.constexpr):
    value = tl.load(p_ptr + place).to(tl.float32)
    if HAS_U:
        value += tl.load(u_ptr + place).to(tl.float32)
    return value


@triton.jit
def _prepare_mamba2(
    p_ptr,
    u_ptr,
    rows_ptr,
    out_ptr,
    U,
    slots_ptr,
    taps_ptr,
    conv_ptr,
    conv_bias_ptr,
    dt_bias_ptr,
    inner,
    C,
    HAS_U: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = m < U
    lane = tl.load(rows_ptr + row)
    slot = tl.load(slots_ptr + lane)
    taps_ptr += lane * W * C
    newest, earlier = mamba2_history(
        m, real, slot, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, W, HAS_BIAS
    )
    y = tl.load(p_ptr + row * U + m, mask=real, other=0.0).to(tl.float32)
    if HAS_U:
        y += tl.load(u_ptr + lane * U + m, mask=real, other=0.0).to(tl.float32)
    y = mamba2_prepared(y, newest, earlier, m, real, taps_ptr + slot * C, inner, C)
    tl.store(out_ptr + row * U + m, y, mask=real)


@triton.jit
def _scan_step(
    p_ptr,
    rows_ptr,
    committing_ptr,
    h_ptr,
    a_log_ptr,
    d_ptr,
    out_ptr,
    U,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0) // (P // BLOCK_P)
    part = tl.program_id(0) % (P // BLOCK_P)
    row = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = H * P
    lane = tl.load(rows_ptr + row)
    p_ptr += row * U
    width, state = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, N)
    place = h_ptr + (lane * H + head) * P * N + width[:, None] * N + state[None, :]
    h = tl.load(place).to(tl.float32)
    group = head // (H // G) * N + state
    gate = tl.load(p_ptr + head * P + width)
    x = tl.load(p_ptr + inner + head * P + width)
    B = tl.load(p_ptr + 2 * inner + group)
    c = tl.load(p_ptr + 2 * inner + G * N + group)
    dt = tl.load(p_ptr + 2 * inner + 2 * G * N + head)
    decay = tl.exp(-dt * tl.exp(tl.load(a_log_ptr + head).to(tl.float32)))
    # C (decay h + dt x Bᵀ) without the sum in brackets: most of the time nobody wants the next h.
    skip = dt * tl.sum(B * c) + tl.load(d_ptr + head).to(tl.float32)
    y = decay * tl.sum(h * c[None, :], axis=1) + skip * x
    tl.store(out_ptr + row * inner + head * P + width, y * gate)
    if tl.load(committing_ptr + row) != 0:
        h = tl.load(place).to(tl.float32)  # again, rather than in registers all the while
        h = h * decay + (dt * x)[:, None] * B[None, :]
        tl.store(place, h.to(h_ptr.dtype.element_ty))


@triton.jit
def _rotated(p_ptr, u_ptr, first, half, cos, sin, F: tl.constexpr, HAS_U: tl.constexpr):
    a = _load_sum(p_ptr, u_ptr, first + half, HAS_U)
    b = _load_sum(p_ptr, u_ptr, first + F + half, HAS_U)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _attention_step(
    p_ptr,
    u_ptr,
    rows_ptr,
    lengths_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    sums_ptr,
    U,
    T,
    scale,
    SPLITS: tl.constexpr,
    H: tl.constexpr,
    KV: tl.constexpr,
    P: tl.constexpr,
    HAS_U: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    F: tl.constexpr = P // 2
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(rows_ptr + row)
    length = tl.load(lengths_ptr + row)
    shared = head // (H // KV)
    p_ptr += row * U
    u_ptr += lane * U
    base = (lane * KV + shared) * T * P
    kind = keys_ptr.dtype.element_ty
    half, whole, time = tl.arange(0, F), tl.arange(0, P), tl.arange(0, BLOCK_T)
    cos = tl.load(cos_ptr + length * F + half).to(tl.float32)
    sin = tl.load(sin_ptr + length * F + half).to(tl.float32)
    q1, q2 = _rotated(p_ptr, u_ptr, head * P, half, cos, sin, F, HAS_U)
    k1, k2 = _rotated(p_ptr, u_ptr, (H + shared) * P, half, cos, sin, F, HAS_U)
    v = _load_sum(p_ptr, u_ptr, (H + KV + shared) * P + whole, HAS_U).to(kind)
    k1, k2 = k1.to(kind), k2.to(kind)  # as they will be read
    split = tl.program_id(2)
    if (head % (H // KV) == 0) & (split == 0):
        here = base + length * P
        tl.store(keys_ptr + here + half, k1)
        tl.store(keys_ptr + here + F + half, k2)
        tl.store(values_ptr + here + whole, v)
    q1, q2 = q1 * scale, q2 * scale
    largest = tl.sum(q1 * k1.to(tl.float32) + q2 * k2.to(tl.float32))
    weights = tl.full((), 1.0, tl.float32)
    y = v.to(tl.float32)
    begin, end = length * 0, length
    if SPLITS > 1:
        span = tl.cdiv(length, SPLITS)
        begin, end = split * span, tl.minimum(length, (split + 1) * span)
        largest = tl.where(split == 0, largest, float("-inf"))  # the token itself belongs to the first
        weights = tl.where(split == 0, weights, 0.0)
        y = tl.where(split == 0, y, 0.0)
    for first in range(begin, end, BLOCK_T):
        position = first + time
        before = position < end
        key = keys_ptr + base + position[:, None] * P + half[None, :]
        a = tl.load(key, mask=before[:, None], other=0.0).to(tl.float32)
        b = tl.load(key + F, mask=before[:, None], other=0.0).to(tl.float32)
        value = values_ptr + base + position[:, None] * P + whole[None, :]
        c = tl.load(value, mask=before[:, None], other=0.0).to(tl.float32)
        score = tl.sum(a * q1[None, :] + b * q2[None, :], axis=1)
        score = tl.where(before, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=0))
        share = tl.exp(score - new)
        kept = tl.exp(largest - new)
        weights = weights * kept + tl.sum(share)
        y = y * kept + tl.sum(c * share[:, None], axis=0)
        largest = new
    if SPLITS == 1:
        tl.store(out_ptr + row * H * P + head * P + whole, (y / weights).to(out_ptr.dtype.element_ty))
    else:
        place = (row * H + head) * SPLITS + split
        tl.store(out_ptr + place * P + whole, y)
        tl.store(sums_ptr + place, largest)
        tl.store(sums_ptr + tl.num_programs(1) * H * SPLITS + place, weights)


@triton.jit
def _join(found_ptr, sums_ptr, out_ptr, count, splits, P: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    split, whole = tl.arange(0, BLOCK), tl.arange(0, P)
    real = split < splits
    sums_ptr += place * splits + split
    largest = tl.load(sums_ptr, mask=real, other=float("-inf"))
    weights = tl.load(sums_ptr + count * splits, mask=real, other=0.0)
    share = tl.exp(largest - tl.max(largest, axis=0))
    found = found_ptr + (place * splits + split[:, None]) * P + whole[None, :]
    y = tl.sum(tl.load(found, mask=real[:, None], other=0.0) * share[:, None], axis=0)
    y = y / tl.sum(weights * share, axis=0)
    tl.store(out_ptr + place * P + whole, y.to(out_ptr.dtype.element_ty))
