"""Operations around Mamba2's scan: convolution and gated norm, which add the injection to the projection.

The projection is ``[gate, x, B, C, dt]``. Adding the injection to all of it separately would cost as much as
the convolution, so each kernel adds its part while reading. Sums are computed in float32.

Shapes: B batch, L tokens, U projection width, I inner width, C convolved channels, W = 4 taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.float8 import E4M3, LARGEST

TAPS = 4  # of the convolution; its kernels keep the last inputs in registers
TOKENS, CHANNELS = 32, 128  # per program of the convolution: tokens in sequence, channels in parallel
# Of the gated norm's backward pass: programs, two per multiprocessor of an H100, and tokens that each of them
# loads ahead. 152 µs instead of 198 at width 1536, 200 instead of 268 at 4096, 670 instead of 745 at 1024.
PROGRAMS, IN_FLIGHT = 264, 3


class Added(NamedTuple):
    """The addition to the projection, (B, L, U), or a table (V, U) and each token's row; None: nothing."""

    u: Tensor | None
    rows_BL: Tensor | None = None

    def given(self, instead: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernel arguments, with a placeholder if there is nothing to add."""
        return instead if self.u is None else self.u, instead if self.rows_BL is None else self.rows_BL

    def constants(self) -> dict[str, bool]:
        """Return the compile-time constants of kernels."""
        return {"HAS_U": self.u is not None, "HAS_ROWS": self.rows_BL is not None}


def conv_forward(
    projected_BLU: Tensor,
    added: Added,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    first: int,
    tail_BWC: Tensor | None = None,
) -> Tensor:
    """Return ``silu(conv(projected + u))``, (B, L, C), for the C channels starting at ``first``.

    ``tail_BWC`` are the inputs of the three tokens before the window, with the injection; None: zeros.
    """
    batch, length, width = projected_BLU.shape
    channels = weight_CW.shape[0]
    y = projected_BLU.new_empty(batch, length, channels)
    grid = (triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS), batch)
    with torch.cuda.device(y.device):
        _conv_forward[grid](
            projected_BLU,
            *added.given(projected_BLU),
            weight_CW,
            bias_C if bias_C is not None else weight_CW,
            y if tail_BWC is None else tail_BWC,
            y,
            length,
            channels,
            *_aligned(width),
            first,
            **added.constants(),
            HAS_BIAS=bias_C is not None,
            HAS_TAIL=tail_BWC is not None,
            TOKENS=TOKENS,
            BLOCK=CHANNELS,
            num_warps=1,
        )
    return y


def conv_backward(
    dy_BLC: Tensor,
    projected_BLU: Tensor,
    added: Added,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    dprojected_BLU: Tensor,
    *,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Write the gradient of the convolved channels to ``dprojected``; return those of weight and bias."""
    batch, length, width = projected_BLU.shape
    channels = weight_CW.shape[0]
    runs = triton.cdiv(length, TOKENS)
    partial = torch.empty(batch * runs, TAPS + 1, channels, dtype=torch.float32, device=dy_BLC.device)
    with torch.cuda.device(dy_BLC.device):
        _conv_backward[(runs, triton.cdiv(channels, CHANNELS), batch)](
            projected_BLU,
            *added.given(projected_BLU),
            weight_CW,
            bias_C if bias_C is not None else weight_CW,
            dy_BLC,
            dprojected_BLU,
            partial,
            length,
            channels,
            *_aligned(width),
            first,
            **added.constants(),
            HAS_BIAS=bias_C is not None,
            TOKENS=TOKENS,
            BLOCK=CHANNELS,
            num_warps=1,
        )
    sums = partial.sum(0)
    return sums[:TAPS].T.contiguous(), sums[TAPS]


def _aligned(width: int) -> tuple[int, int]:
    """Return the width as a multiple of 8, if it is one, so that the compiler loads 16 bytes at a time.

    Triton detects only multiples of 16; the 130M model's 3352 is not one.
    """
    return (width // 8, 8) if width % 8 == 0 else (width, 1)


def gated_norm_forward(
    y_BLI: Tensor,
    projected_BLU: Tensor,
    added: Added,
    weight_I: Tensor,
    *,
    eps: float,
    groups: int,
    scales_BL: Tensor | None = None,
) -> Tensor:
    """Return ``rms(y · silu(gate)) · w`` with the gate in the first I columns of ``projected + u``.

    With ``scales_BL`` (float32; one group) the values are in 8-bit floats, with their scales written there.
    """
    tokens, inner = y_BLI.shape[0] * y_BLI.shape[1], y_BLI.shape[2]
    out = torch.empty_like(y_BLI, dtype=y_BLI.dtype if scales_BL is None else E4M3)
    block = triton.next_power_of_2(inner // groups)
    with torch.cuda.device(out.device):
        _gated_norm_forward[(tokens, groups)](
            y_BLI,
            projected_BLU,
            *added.given(projected_BLU),
            weight_I,
            out,
            out if scales_BL is None else scales_BL,
            inner,
            inner // groups,
            *_aligned(projected_BLU.shape[2]),
            eps,
            **added.constants(),
            LARGEST=0.0 if scales_BL is None else LARGEST,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


def gated_norm_backward(
    dout_BLI: Tensor,
    y_BLI: Tensor,
    projected_BLU: Tensor,
    added: Added,
    weight_I: Tensor,
    dprojected_BLU: Tensor,
    *,
    eps: float,
    groups: int,
    again: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write the gate's gradient to ``dprojected``; return the gradients of y and of the weight.

    With ``again`` the norm's values replace its gradient in ``dout``, at no further cost.
    """
    tokens, inner = y_BLI.shape[0] * y_BLI.shape[1], y_BLI.shape[2]
    dy = torch.empty_like(y_BLI)
    block = triton.next_power_of_2(inner // groups)
    programs = min(tokens, PROGRAMS)
    partial = torch.empty(programs, inner, dtype=torch.float32, device=y_BLI.device)
    with torch.cuda.device(dy.device):
        _gated_norm_backward[(programs, groups)](
            dout_BLI,
            y_BLI,
            projected_BLU,
            *added.given(projected_BLU),
            weight_I,
            dy,
            dprojected_BLU,
            partial,
            tokens,
            inner,
            inner // groups,
            *_aligned(projected_BLU.shape[2]),
            eps,
            **added.constants(),
            AGAIN=again,
            STAGES=IN_FLIGHT,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return dy, partial.sum(0)


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))


@triton.jit
def _load_sum(
    p_ptr, u_ptr, rows_ptr, token, real, width, column, mask, HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr
):  # fmt: skip
    # ``token`` counts over all rows of the batch, in 64 bits; ``real`` masks out-of-range tokens.
    value = tl.load(p_ptr + token * width + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_U:
        place = token
        if HAS_ROWS:
            place = tl.load(rows_ptr + token, mask=real, other=0)
        value += tl.load(u_ptr + place * width + column, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _conv_forward(
    p_ptr,
    u_ptr,
    rows_ptr,
    w_ptr,
    b_ptr,
    tail_ptr,
    y_ptr,
    L,
    C,
    width_part,
    UNIT: tl.constexpr,
    first,
    HAS_U: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    width = width_part * UNIT
    begin = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64) * L
    real = channel < C
    w0 = tl.load(w_ptr + channel * 4, mask=real, other=0.0).to(tl.float32)
    w1 = tl.load(w_ptr + channel * 4 + 1, mask=real, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + channel * 4 + 2, mask=real, other=0.0).to(tl.float32)
    w3 = tl.load(w_ptr + channel * 4 + 3, mask=real, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(b_ptr + channel, mask=real, other=0.0).to(tl.float32)
    column, now = first + channel, row + begin
    x0 = _load_sum(
        p_ptr, u_ptr, rows_ptr, now - 3, begin >= 3, width, column, real & (begin >= 3), HAS_U, HAS_ROWS
    )
    x1 = _load_sum(
        p_ptr, u_ptr, rows_ptr, now - 2, begin >= 2, width, column, real & (begin >= 2), HAS_U, HAS_ROWS
    )
    x2 = _load_sum(
        p_ptr, u_ptr, rows_ptr, now - 1, begin >= 1, width, column, real & (begin >= 1), HAS_U, HAS_ROWS
    )
    if HAS_TAIL:
        before = real & (begin == 0)
        tail = tail_ptr + tl.program_id(2).to(tl.int64) * 3 * C + channel
        x0 += tl.load(tail, mask=before, other=0.0).to(tl.float32)
        x1 += tl.load(tail + C, mask=before, other=0.0).to(tl.float32)
        x2 += tl.load(tail + 2 * C, mask=before, other=0.0).to(tl.float32)
    for step in tl.static_range(TOKENS):
        token = begin + step
        here = real & (token < L)
        x3 = _load_sum(p_ptr, u_ptr, rows_ptr, row + token, token < L, width, column, here, HAS_U, HAS_ROWS)
        pre = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        y = pre * tl.sigmoid(pre)
        tl.store(y_ptr + (row + token) * C + channel, y.to(y_ptr.dtype.element_ty), mask=here)
        x0 = x1
        x1 = x2
        x2 = x3


@triton.jit
def _conv_backward(
    p_ptr,
    u_ptr,
    rows_ptr,
    w_ptr,
    b_ptr,
    dy_ptr,
    dp_ptr,
    partial_ptr,
    L,
    C,
    width_part,
    UNIT: tl.constexpr,
    first,
    HAS_U: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # dpre_t is the gradient before SiLU; dx_t = Σ_k w_{3-k} dpre_{t+k} needs three tokens after the block.
    width = width_part * UNIT
    begin = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64) * L
    real = channel < C
    w0 = tl.load(w_ptr + channel * 4, mask=real, other=0.0).to(tl.float32)
    w1 = tl.load(w_ptr + channel * 4 + 1, mask=real, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + channel * 4 + 2, mask=real, other=0.0).to(tl.float32)
    w3 = tl.load(w_ptr + channel * 4 + 3, mask=real, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(b_ptr + channel, mask=real, other=0.0).to(tl.float32)
    column, now = first + channel, row + begin
    x0 = _load_sum(
        p_ptr, u_ptr, rows_ptr, now - 3, begin >= 3, width, column, real & (begin >= 3), HAS_U, HAS_ROWS
    )
    x1 = _load_sum(
        p_ptr, u_ptr, rows_ptr, now - 2, begin >= 2, width, column, real & (begin >= 2), HAS_U, HAS_ROWS
    )
    x2 = _load_sum(
        p_ptr, u_ptr, rows_ptr, now - 1, begin >= 1, width, column, real & (begin >= 1), HAS_U, HAS_ROWS
    )
    zero = tl.zeros((BLOCK,), tl.float32)
    d0, d1, d2 = zero, zero, zero
    dw0, dw1, dw2, dw3, dbias = zero, zero, zero, zero, zero
    for step in tl.static_range(TOKENS + 3):
        token = begin + step
        here = real & (token < L)
        x3 = _load_sum(p_ptr, u_ptr, rows_ptr, row + token, token < L, width, column, here, HAS_U, HAS_ROWS)
        pre = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        sigmoid = tl.sigmoid(pre)
        dy = tl.load(dy_ptr + (row + token) * C + channel, mask=here, other=0.0).to(tl.float32)
        d3 = dy * sigmoid * (1.0 + pre * (1.0 - sigmoid))
        if step < TOKENS:
            dw0 += d3 * x0
            dw1 += d3 * x1
            dw2 += d3 * x2
            dw3 += d3 * x3
            dbias += d3
        if step >= 3:
            dx = w3 * d0 + w2 * d1 + w1 * d2 + w0 * d3
            tl.store(
                dp_ptr + (row + token - 3) * width + column,
                dx.to(dp_ptr.dtype.element_ty),
                mask=real & (token - 3 < L),
            )
        x0 = x1
        x1 = x2
        x2 = x3
        d0 = d1
        d1 = d2
        d2 = d3
    run = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    partial_ptr += run * 5 * C + channel
    tl.store(partial_ptr, dw0, mask=real)
    tl.store(partial_ptr + C, dw1, mask=real)
    tl.store(partial_ptr + 2 * C, dw2, mask=real)
    tl.store(partial_ptr + 3 * C, dw3, mask=real)
    tl.store(partial_ptr + 4 * C, dbias, mask=real)


@triton.jit
def _gated_norm_forward(
    y_ptr,
    p_ptr,
    u_ptr,
    rows_ptr,
    w_ptr,
    out_ptr,
    scales_ptr,
    inner,
    part,
    width_part,
    UNIT: tl.constexpr,
    eps,
    HAS_U: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    width = width_part * UNIT
    token = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    real = entry < part
    column = tl.program_id(1) * part + entry
    gate = _load_sum(p_ptr, u_ptr, rows_ptr, token, True, width, column, real, HAS_U, HAS_ROWS)
    value = tl.load(y_ptr + token * inner + column, mask=real, other=0.0).to(tl.float32)
    value *= gate * tl.sigmoid(gate)
    scale = tl.rsqrt(tl.sum(value * value) / part + eps)
    weight = tl.load(w_ptr + column, mask=real, other=0.0).to(tl.float32)
    out = value * scale * weight
    if LARGEST > 0:  # in 8-bit floats, with a scale for the token
        scale = tl.maximum(tl.max(tl.abs(out), 0), 1e-30) / LARGEST
        tl.store(scales_ptr + token, scale)
        out /= scale
    tl.store(out_ptr + token * inner + column, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _gated_norm_backward(
    dout_ptr,
    y_ptr,
    p_ptr,
    u_ptr,
    rows_ptr,
    w_ptr,
    dy_ptr,
    dp_ptr,
    partial_ptr,
    tokens,
    inner,
    part,
    width_part,
    UNIT: tl.constexpr,
    eps,
    HAS_U: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    AGAIN: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    width = width_part * UNIT
    entry = tl.arange(0, BLOCK)
    real = entry < part
    column = tl.program_id(1) * part + entry
    weight = tl.load(w_ptr + column, mask=real, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(step, tl.int64)
        gate = _load_sum(p_ptr, u_ptr, rows_ptr, token, True, width, column, real, HAS_U, HAS_ROWS)
        y = tl.load(y_ptr + token * inner + column, mask=real, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + token * inner + column, mask=real, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        value = y * silu
        scale = tl.rsqrt(tl.sum(value * value) / part + eps)
        normed = value * scale
        dweight += dout * normed
        dnormed = dout * weight
        dvalue = scale * (dnormed - normed * (tl.sum(dnormed * normed) / part))
        tl.store(dy_ptr + token * inner + column, (dvalue * silu).to(dy_ptr.dtype.element_ty), mask=real)
        dgate = dvalue * y * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dp_ptr + token * width + column, dgate.to(dp_ptr.dtype.element_ty), mask=real)
        if AGAIN:
            out = normed * weight
            tl.store(dout_ptr + token * inner + column, out.to(dout_ptr.dtype.element_ty), mask=real)
    tl.store(partial_ptr + tl.program_id(0) * inner + column, dweight, mask=real)
