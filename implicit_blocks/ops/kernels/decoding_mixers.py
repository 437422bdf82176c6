"""Mixers of one token in each of a few rows: all between their projections in one kernel.

Shape legend: S lanes, R rows of a step, each in a lane; U projection width, I inner width, C convolved
channels, W taps, H heads, K key and value heads, P head width, G groups, N state width, T room for tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding import on_device


def mamba2_step(
    projected_RU: Tensor,
    u_SU: Tensor | None,
    rows_R: Tensor,
    slots_S: Tensor,
    committing_R: Tensor,
    taps_SWC: Tensor,
    h_SHPN: Tensor,
    *,
    conv_weight_CW: Tensor,
    conv_bias_C: Tensor | None,
    dt_bias_H: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    groups: int,
) -> Tensor:
    """Return ``y · silu(gate)``, (R, I) float32, of one token in each row's lane: convolution, scan and gate.

    Args:
        projected_RU: gate, x, B, C, dt, contiguous.
        u_SU: the injection of each lane; None: there is none, or it has been added.
        rows_R: int64, the lane of each row, all different.
        slots_S: int64, which of the W slots of its lane the token's input of the convolution takes; those of
            the tokens before it lie behind, the oldest first, and around the end.
        committing_R: bool, which rows commit: their ``h`` is replaced. Nobody else's is written.
        taps_SWC: inputs of the convolution; that of the token is written to its slot.
        h_SHPN: states, P and N powers of 2.
        conv_weight_CW: oldest tap first.
        conv_bias_C: or None.
        dt_bias_H: added before softplus.
        A_log_H: ``log(−A)``.
        D_H: the skip connection.
        groups: of heads that share B and C.

    """
    _, heads, head_dim, d_state = h_SHPN.shape
    rows, inner = len(rows_R), heads * head_dim
    out = torch.empty(rows, inner, dtype=torch.float32, device=h_SHPN.device)
    part = min(head_dim, 32) if rows < 8 else head_dim
    with on_device(out.device):
        _mamba2_step[(heads * (head_dim // part), rows)](
            projected_RU,
            projected_RU if u_SU is None else u_SU,
            rows_R,
            slots_S,
            committing_R.view(torch.int8),
            taps_SWC,
            h_SHPN,
            conv_weight_CW,
            conv_weight_CW if conv_bias_C is None else conv_bias_C,
            dt_bias_H,
            A_log_H,
            D_H,
            out,
            projected_RU.shape[1],
            taps_SWC.shape[2],
            H=heads,
            P=head_dim,
            N=d_state,
            G=groups,
            W=taps_SWC.shape[1],
            HAS_U=u_SU is not None,
            HAS_BIAS=conv_bias_C is not None,
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
    rows = len(rows_R)
    out = torch.empty(rows, n_heads * head_dim, dtype=dtype, device=keys_SKTP.device)
    with on_device(out.device):
        _attention_step[(n_heads, rows)](
            projected_RU,
            projected_RU if u_SU is None else u_SU,
            rows_R,
            lengths_R,
            keys_SKTP,
            values_SKTP,
            cos_TF,
            sin_TF,
            out,
            projected_RU.shape[1],
            room,
            head_dim**-0.5,
            H=n_heads,
            KV=kv_heads,
            P=head_dim,
            HAS_U=u_SU is not None,
            BLOCK_T=64,
            num_warps=4,
        )
    return out


@triton.jit
def _load_sum(p_ptr, u_ptr, place, HAS_U: tl.constexpr):
    value = tl.load(p_ptr + place).to(tl.float32)
    if HAS_U:
        value += tl.load(u_ptr + place).to(tl.float32)
    return value


@triton.jit
def _conv(here, taps_ptr, w_ptr, b_ptr, channel, slot, C, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    y = here * tl.load(w_ptr + channel * W + W - 1).to(tl.float32)
    for tap in tl.static_range(W - 1):
        before = tl.load(taps_ptr + (slot + 1 + tap) % W * C + channel).to(tl.float32)
        y += before * tl.load(w_ptr + channel * W + tap).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(b_ptr + channel).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _mamba2_step(
    p_ptr,
    u_ptr,
    rows_ptr,
    slots_ptr,
    committing_ptr,
    taps_ptr,
    h_ptr,
    w_ptr,
    b_ptr,
    dt_bias_ptr,
    a_log_ptr,
    d_ptr,
    out_ptr,
    U,
    C,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    HAS_U: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0) // (P // BLOCK_P)
    part = tl.program_id(0) % (P // BLOCK_P)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(rows_ptr + row)
    slot = tl.load(slots_ptr + lane)
    inner = H * P
    group = head // (H // G)
    p_ptr += row * U
    u_ptr += lane * U
    taps_ptr += lane * W * C
    width, state = tl.arange(0, BLOCK_P), tl.arange(0, N)
    x_channel = head * P + part * BLOCK_P + width
    place = h_ptr + (lane * H + head) * P * N + (part * BLOCK_P + width)[:, None] * N + state[None, :]
    h = tl.load(place).to(tl.float32)
    b_channel = inner + group * N + state
    c_channel = inner + (G + group) * N + state
    x_here = _load_sum(p_ptr, u_ptr, inner + x_channel, HAS_U)
    b_here = _load_sum(p_ptr, u_ptr, inner + b_channel, HAS_U)
    c_here = _load_sum(p_ptr, u_ptr, inner + c_channel, HAS_U)
    x = _conv(x_here, taps_ptr, w_ptr, b_ptr, x_channel, slot, C, W, HAS_BIAS)
    B = _conv(b_here, taps_ptr, w_ptr, b_ptr, b_channel, slot, C, W, HAS_BIAS)
    c = _conv(c_here, taps_ptr, w_ptr, b_ptr, c_channel, slot, C, W, HAS_BIAS)
    dt = _load_sum(p_ptr, u_ptr, inner + C + head, HAS_U) + tl.load(dt_bias_ptr + head).to(tl.float32)
    dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(dt)))
    decay = tl.exp(-dt * tl.exp(tl.load(a_log_ptr + head).to(tl.float32)))
    h = h * decay + (dt * x)[:, None] * B[None, :]
    y = tl.sum(h * c[None, :], axis=1) + x * tl.load(d_ptr + head).to(tl.float32)
    gate = _load_sum(p_ptr, u_ptr, x_channel, HAS_U)
    tl.store(out_ptr + row * inner + x_channel, y * gate * tl.sigmoid(gate))
    # The slot of the token itself: nobody reads it before the token is committed.
    taps_ptr += slot * C
    kind = taps_ptr.dtype.element_ty
    tl.store(taps_ptr + x_channel, x_here.to(kind))
    if (head % (H // G) == 0) & (part == 0):
        tl.store(taps_ptr + b_channel, b_here.to(kind))
        tl.store(taps_ptr + c_channel, c_here.to(kind))
    if tl.load(committing_ptr + row) != 0:
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
    U,
    T,
    scale,
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
    if head % (H // KV) == 0:
        here = base + length * P
        tl.store(keys_ptr + here + half, k1)
        tl.store(keys_ptr + here + F + half, k2)
        tl.store(values_ptr + here + whole, v)
    q1, q2 = q1 * scale, q2 * scale
    largest = tl.sum(q1 * k1.to(tl.float32) + q2 * k2.to(tl.float32))
    weights = tl.full((), 1.0, tl.float32)
    y = v.to(tl.float32)
    for first in range(0, length, BLOCK_T):
        position = first + time
        before = position < length
        key = keys_ptr + base + position[:, None] * P + half[None, :]
        k1 = tl.load(key, mask=before[:, None], other=0.0).to(tl.float32)
        k2 = tl.load(key + F, mask=before[:, None], other=0.0).to(tl.float32)
        values = values_ptr + base + position[:, None] * P + whole[None, :]
        v = tl.load(values, mask=before[:, None], other=0.0).to(tl.float32)
        score = tl.sum(k1 * q1[None, :] + k2 * q2[None, :], axis=1)
        score = tl.where(before, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=0))
        share = tl.exp(score - new)
        kept = tl.exp(largest - new)
        weights = weights * kept + tl.sum(share)
        y = y * kept + tl.sum(v * share[:, None], axis=0)
        largest = new
    tl.store(out_ptr + row * H * P + head * P + whole, (y / weights).to(out_ptr.dtype.element_ty))
