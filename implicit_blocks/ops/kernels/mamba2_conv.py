"""Mamba2's convolution and its gradient, which add the injection to the projection while they read it.

Shapes as in ``mamba2_parts``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.mamba2_parts import Added, aligned

TAPS = 4  # of the convolution; its kernels keep the last inputs in registers
TOKENS, CHANNELS = 32, 128  # per program: tokens in sequence, channels in parallel


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
    y = projected_BLU.new_empty(*projected_BLU.shape[:2], weight_CW.shape[0])
    given = (projected_BLU, added, weight_CW, bias_C)
    outputs = (y if tail_BWC is None else tail_BWC, y)
    _launch(_conv_forward, *given, outputs, first, HAS_TAIL=tail_BWC is not None)
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
    programs = dy_BLC.shape[0] * triton.cdiv(dy_BLC.shape[1], TOKENS)
    shape = (programs, TAPS + 1, weight_CW.shape[0])
    partial = torch.empty(shape, dtype=torch.float32, device=dy_BLC.device)
    given = (projected_BLU, added, weight_CW, bias_C)
    _launch(_conv_backward, *given, (dy_BLC, dprojected_BLU, partial), first)
    sums = partial.sum(0)
    return sums[:TAPS].T.contiguous(), sums[TAPS]


def _launch(
    kernel: Any,
    projected_BLU: Tensor,
    added: Added,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    others: tuple[Tensor, ...],
    first: int,
    **constants: bool,
) -> None:
    """Run a kernel with one program per run of tokens, run of channels and sequence."""
    (batch, length, _), channels = projected_BLU.shape, weight_CW.shape[0]
    with torch.cuda.device(projected_BLU.device):
        kernel[(triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS), batch)](
            projected_BLU,
            *added.given(projected_BLU),
            weight_CW,
            weight_CW if bias_C is None else bias_C,
            *others,
            *(length, channels),
            *aligned(projected_BLU),
            first,
            **added.constants(),
            HAS_BIAS=bias_C is not None,
            TOKENS=TOKENS,
            BLOCK=CHANNELS,
            num_warps=1,
            **constants,
        )


@triton.jit
def _four(ptr, places, width, column, real, within):
    # Rows of four tokens, in float32. The compiler moves no load ahead of a store or of another load: reads
    # of several tokens are in flight together only where the program has them together.
    a = tl.load(ptr + places[0] * width + column, mask=real & within[0], other=0.0)
    b = tl.load(ptr + places[1] * width + column, mask=real & within[1], other=0.0)
    c = tl.load(ptr + places[2] * width + column, mask=real & within[2], other=0.0)
    d = tl.load(ptr + places[3] * width + column, mask=real & within[3], other=0.0)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _four_sums(
    p_ptr, u_ptr, rows_ptr, row, first, low, high, stride, width, column, real,
    HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    # ``p + u`` of the tokens from ``first`` on, as in _load_sum; 0 outside those from ``low`` to ``high``.
    places = (row + first, row + first + 1, row + first + 2, row + first + 3)
    within = (
        (first >= low) & (first < high),
        (first + 1 >= low) & (first + 1 < high),
        (first + 2 >= low) & (first + 2 < high),
        (first + 3 >= low) & (first + 3 < high),
    )
    found = places
    if HAS_ROWS:
        found = (
            tl.load(rows_ptr + places[0], mask=within[0], other=0),
            tl.load(rows_ptr + places[1], mask=within[1], other=0),
            tl.load(rows_ptr + places[2], mask=within[2], other=0),
            tl.load(rows_ptr + places[3], mask=within[3], other=0),
        )
    x = _four(p_ptr, places, stride, column, real, within)
    if HAS_U:
        u = _four(u_ptr, found, width, column, real, within)
        x = (x[0] + u[0], x[1] + u[1], x[2] + u[2], x[3] + u[3])
    return x


@triton.jit
def _taps(w_ptr, b_ptr, channel, real, HAS_BIAS: tl.constexpr):
    w0 = tl.load(w_ptr + channel * 4, mask=real, other=0.0).to(tl.float32)
    w1 = tl.load(w_ptr + channel * 4 + 1, mask=real, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + channel * 4 + 2, mask=real, other=0.0).to(tl.float32)
    w3 = tl.load(w_ptr + channel * 4 + 3, mask=real, other=0.0).to(tl.float32)
    bias = tl.zeros_like(w0)
    if HAS_BIAS:
        bias = tl.load(b_ptr + channel, mask=real, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, bias


@triton.jit
def _conv_forward(
    p_ptr, u_ptr, rows_ptr, w_ptr, b_ptr, tail_ptr, y_ptr, L, C, stride_part, width_part,
    UNIT: tl.constexpr, first, HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    stride, width = stride_part * UNIT, width_part * UNIT
    begin = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64) * L
    real = channel < C
    w0, w1, w2, w3, bias = _taps(w_ptr, b_ptr, channel, real, HAS_BIAS)
    column = first + channel
    early = tl.maximum(begin - 3, 0)
    _, x0, x1, x2 = _four_sums(
        p_ptr, u_ptr, rows_ptr, row, begin - 4, early, L, stride, width, column, real, HAS_U, HAS_ROWS
    )
    if HAS_TAIL:
        before = real & (begin == 0)
        tail = tail_ptr + tl.program_id(2).to(tl.int64) * 3 * C + channel
        x0 += tl.load(tail, mask=before, other=0.0).to(tl.float32)
        x1 += tl.load(tail + C, mask=before, other=0.0).to(tl.float32)
        x2 += tl.load(tail + 2 * C, mask=before, other=0.0).to(tl.float32)
    following = _four_sums(
        p_ptr, u_ptr, rows_ptr, row, begin, 0, L, stride, width, column, real, HAS_U, HAS_ROWS
    )
    for group in tl.static_range(0, TOKENS, 4):
        now = following
        if group + 4 < TOKENS:
            following = _four_sums(
                p_ptr,
                u_ptr,
                rows_ptr,
                row,
                begin + group + 4,
                0,
                L,
                stride,
                width,
                column,
                real,
                HAS_U,
                HAS_ROWS,
            )
        for step in tl.static_range(4):
            token = begin + group + step
            x3 = now[step]
            pre = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            y = pre * tl.sigmoid(pre)
            tl.store(
                y_ptr + (row + token) * C + channel, y.to(y_ptr.dtype.element_ty), mask=real & (token < L)
            )
            x0 = x1
            x1 = x2
            x2 = x3


@triton.jit
def _conv_backward(
    p_ptr, u_ptr, rows_ptr, w_ptr, b_ptr, dy_ptr, dp_ptr, partial_ptr, L, C, stride_part, width_part,
    UNIT: tl.constexpr, first, HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # dpre_t is the gradient before SiLU; dx_t = Σ_k w_{3-k} dpre_{t+k} needs three tokens after the block.
    stride, width = stride_part * UNIT, width_part * UNIT
    begin = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64) * L
    real = channel < C
    w0, w1, w2, w3, bias = _taps(w_ptr, b_ptr, channel, real, HAS_BIAS)
    column = first + channel
    early, end = tl.maximum(begin - 3, 0), tl.minimum(begin + TOKENS + 3, L)
    _, x0, x1, x2 = _four_sums(
        p_ptr, u_ptr, rows_ptr, row, begin - 4, early, end, stride, width, column, real, HAS_U, HAS_ROWS
    )
    zero = tl.zeros((BLOCK,), tl.float32)
    d0, d1, d2 = zero, zero, zero
    dw0, dw1, dw2, dw3, dbias = zero, zero, zero, zero, zero
    later = _four_sums(
        p_ptr, u_ptr, rows_ptr, row, begin, 0, end, stride, width, column, real, HAS_U, HAS_ROWS
    )
    later_dy = _four_sums(dy_ptr, dy_ptr, dy_ptr, row, begin, 0, end, C, C, channel, real, False, False)
    for group in tl.static_range(0, TOKENS + 3, 4):
        now, now_dy = later, later_dy
        if group + 4 < TOKENS + 3:
            then = begin + group + 4
            later = _four_sums(
                p_ptr, u_ptr, rows_ptr, row, then, 0, end, stride, width, column, real, HAS_U, HAS_ROWS
            )
            later_dy = _four_sums(
                dy_ptr, dy_ptr, dy_ptr, row, then, 0, end, C, C, channel, real, False, False
            )
        for part in tl.static_range(4):
            step = group + part
            token = begin + step
            x3 = now[part]
            pre = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            sigmoid = tl.sigmoid(pre)
            d3 = now_dy[part] * sigmoid * (1.0 + pre * (1.0 - sigmoid))
            if step < TOKENS:
                dw0 += d3 * x0
                dw1 += d3 * x1
                dw2 += d3 * x2
                dw3 += d3 * x3
                dbias += d3
            if step >= 3 and step < TOKENS + 3:
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
