"""One token in each of a few rows: a layer in three or five kernels, for decoding.

What a layer must cost there is reading its weights and states once; every further kernel costs its launch.
So norms, injection, activation and residual are part of the matrix product beside them, and nothing is
written to a state until a token is committed.

Shape legend: S lanes, R rows of a step, each in a lane; K input width, M output width; U projection width, I
inner width, C convolved channels, W taps, H heads, P head width, G groups, N state width, T room for tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


def linear_rows(
    x_RK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    gate_MK: Tensor | None = None,
    gate_bias_M: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    u_SM: Tensor | None = None,
    rows_R: Tensor | None = None,
    z_RM: Tensor | None = None,
) -> Tensor:
    """Return ``W x + b``, (R, M) float32, each row by itself: for a few rows, up to two or so.

    Sums are taken in float32, x is not rounded to the weight's type.

    Args:
        x_RK: rows, contiguous, any floating type.
        weight_MK: contiguous.
        bias_M: of it.
        gate_MK: the result is ``silu(V x + c) · (W x + b)`` with this V, as in SwiGLU.
        gate_bias_M: c.
        norm_K: x is ``rms(x) · norm`` first.
        eps: of that norm.
        u_SM: row ``rows_R`` of it is added.
        rows_R: int64, the lane of each row.
        z_RM: float32, added.

    """
    rows, width = x_RK.shape
    outputs = weight_MK.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x_RK.device)
    block = 4 if outputs <= 4096 else 8
    with _on(x_RK.device):
        _linear_rows[(rows, triton.cdiv(outputs, block))](
            x_RK,
            x_RK if norm_K is None else norm_K,
            weight_MK,
            weight_MK if bias_M is None else bias_M,
            weight_MK if gate_MK is None else gate_MK,
            weight_MK if gate_bias_M is None else gate_bias_M,
            x_RK if u_SM is None else u_SM,
            x_RK if rows_R is None else rows_R,
            x_RK if z_RM is None else z_RM,
            out,
            outputs,
            eps,
            K=width,
            NORM=norm_K is not None,
            HAS_BIAS=bias_M is not None,
            GATE=gate_MK is not None,
            HAS_GATE_BIAS=gate_bias_M is not None,
            HAS_U=u_SM is not None,
            HAS_Z=z_RM is not None,
            BLOCK_M=block,
            BLOCK_K=min(1024, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return out


def add_norm(
    z_RD: Tensor,
    branch_RD: Tensor | None,
    weight_D: Tensor,
    *,
    eps: float,
    groups: int = 1,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return ``z + branch`` in z's type, z itself without a branch, and ``rms(z + branch) · w`` in ``dtype``.

    With ``groups`` the mean square is that of each of so many equal parts.
    """
    rows, width = z_RD.shape
    total = z_RD if branch_RD is None else torch.empty_like(z_RD)
    normed = torch.empty(rows, width, dtype=dtype, device=z_RD.device)
    part = width // groups
    block = triton.next_power_of_2(part)
    with _on(z_RD.device):
        _add_norm[(rows, groups)](
            z_RD,
            z_RD if branch_RD is None else branch_RD,
            weight_D,
            total,
            normed,
            width,
            part,
            eps,
            HAS_BRANCH=branch_RD is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )
    return total, normed


def silu_product(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """Return ``silu(gate) · up``, of their type; both contiguous."""
    out = torch.empty_like(up_RF)
    with _on(out.device):
        _silu_product[(triton.cdiv(out.numel(), 1024),)](gate_RF, up_RF, out, out.numel(), BLOCK=1024)
    return out


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
    with _on(out.device):
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
    with _on(out.device):
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


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def _linear_rows(
    x_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    gate_ptr,
    gate_bias_ptr,
    u_ptr,
    rows_ptr,
    z_ptr,
    out_ptr,
    M,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_U: tl.constexpr,
    HAS_Z: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < M
    column = tl.arange(0, BLOCK_K)
    weight = m[:, None].to(tl.int64) * K + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        inside = first + column < K
        both = real[:, None] & inside[None, :]
        w = tl.load(w_ptr + weight + first, mask=both, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * K + first + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            # The norm's divisor is one number a row, which the product need not wait for.
            squares += x * x
            x *= tl.load(norm_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
        total += w * x[None, :]
        if GATE:
            v = tl.load(gate_ptr + weight + first, mask=both, other=0.0).to(tl.float32)
            gate += v * x[None, :]
    y = tl.sum(total, axis=1)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
        y *= scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + m, mask=real, other=0.0).to(tl.float32)
    if GATE:
        g = tl.sum(gate, axis=1) * scale
        if HAS_GATE_BIAS:
            g += tl.load(gate_bias_ptr + m, mask=real, other=0.0).to(tl.float32)
        y *= g * tl.sigmoid(g)
    if HAS_U:
        lane = tl.load(rows_ptr + row)
        y += tl.load(u_ptr + lane * M + m, mask=real, other=0.0).to(tl.float32)
    if HAS_Z:
        y += tl.load(z_ptr + row * M + m, mask=real, other=0.0)
    tl.store(out_ptr + row * M + m, y, mask=real)


@triton.jit
def _add_norm(
    z_ptr,
    branch_ptr,
    w_ptr,
    total_ptr,
    out_ptr,
    D,
    part,
    eps,
    HAS_BRANCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * D
    place = tl.arange(0, BLOCK)
    real = place < part
    column = tl.program_id(1) * part + place
    z = tl.load(z_ptr + row + column, mask=real, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        z += tl.load(branch_ptr + row + column, mask=real, other=0.0).to(tl.float32)
        tl.store(total_ptr + row + column, z, mask=real)
    scale = 1.0 / tl.sqrt(tl.sum(z * z) / part + eps)
    w = tl.load(w_ptr + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, (z * scale * w).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _silu_product(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    gate = tl.load(gate_ptr + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=real)


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
