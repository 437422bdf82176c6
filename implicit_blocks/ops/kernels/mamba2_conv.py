"""Mamba2's convolution and its gradient, which add the injection to the projection while they read it.

Shapes as in ``mamba2_parts``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.instructions import NVIDIA, sigmoid
from implicit_blocks.ops.kernels.mamba2_parts import Added

TAPS = 4  # of the convolution; its kernels keep the last inputs in registers
# Per program: tokens in sequence, channels in parallel. The loop over the tokens of the forward pass is
# unrolled: 16 fit into the cache of instructions.
FORWARD = {"TOKENS": 16, "BLOCK": 128, "num_warps": 2}
BACKWARD = {"TOKENS": 128, "BLOCK": 128, "num_warps": 1} | ({"maxnreg": 128} if NVIDIA.value else {})


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
    _launch(_conv_forward, *given, outputs, first, FORWARD, HAS_TAIL=tail_BWC is not None)
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
    programs = dy_BLC.shape[0] * triton.cdiv(dy_BLC.shape[1], BACKWARD["TOKENS"])
    partial = torch.empty(programs, TAPS + 1, weight_CW.shape[0], dtype=torch.float32, device=dy_BLC.device)
    given = (projected_BLU, added, weight_CW, bias_C)
    _launch(_conv_backward, *given, (dy_BLC, dprojected_BLU, partial), first, BACKWARD)
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
    tiles: dict[str, int],
    **constants: bool,
) -> None:
    """Run a kernel with one program per run of tokens, run of channels and sequence."""
    (batch, length, width), channels = projected_BLU.shape, weight_CW.shape[0]
    with torch.cuda.device(projected_BLU.device):
        kernel[(triton.cdiv(length, tiles["TOKENS"]), triton.cdiv(channels, tiles["BLOCK"]), batch)](
            projected_BLU,
            *added.given(projected_BLU),
            weight_CW,
            weight_CW if bias_C is None else bias_C,
            *others,
            *(length, channels, projected_BLU.stride(1), width, first),
            **added.constants(),
            HAS_BIAS=bias_C is not None,
            **tiles,
            **constants,
        )


@triton.jit
def _places(rows_ptr, row, first, high, WIDTH: tl.constexpr, HAS_ROWS: tl.constexpr):
    # Offsets of the rows of four tokens; with ``HAS_ROWS`` those of the table's rows that the tokens have.
    places = ()
    for n in tl.static_range(4):
        place = row + first + n
        if HAS_ROWS:
            place = tl.load(rows_ptr + place, mask=(first + n >= 0) & (first + n < high), other=0)
        places += (place * WIDTH,)
    return places


@triton.jit
def _four(ptr, places, channel, real, first, high):
    # Four tokens' rows, 0 outside those from 0 to ``high``, as they are in memory: a conversion would wait
    # for them. The compiler moves no load ahead of a store or of another load: several are in flight
    # together only where the program has them together.
    rows = ()
    for n in tl.static_range(4):
        within = real & (first + n >= 0) & (first + n < high)
        rows += (tl.load(ptr + places[n] + channel, mask=within, other=0.0),)
    return rows


@triton.jit
def _parts(
    p_ptr, u_ptr, places, row, first, high, channel, real, STRIDE: tl.constexpr, HAS_U: tl.constexpr
):  # fmt: skip
    # ``p`` and ``u`` of four tokens; without an addition ``p`` twice.
    p = _four(p_ptr, _places(p_ptr, row, first, high, STRIDE, False), channel, real, first, high)
    if HAS_U:
        return p, _four(u_ptr, places, channel, real, first, high)
    return p, p


@triton.jit
def _sum(parts, token: tl.constexpr, HAS_U: tl.constexpr):
    x = parts[0][token].to(tl.float32)
    if HAS_U:
        x += parts[1][token].to(tl.float32)
    return x


@triton.jit
def _taps(w_ptr, b_ptr, channel, real, HAS_BIAS: tl.constexpr):
    weights = ()
    for n in tl.static_range(4):
        weights += (tl.load(w_ptr + channel * 4 + n, mask=real, other=0.0).to(tl.float32),)
    bias = tl.zeros_like(channel).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(b_ptr + channel, mask=real, other=0.0).to(tl.float32)
    return weights, bias


@triton.jit
def _conv_forward(
    p_ptr, u_ptr, rows_ptr, w_ptr, b_ptr, tail_ptr, y_ptr, L, C: tl.constexpr, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64) * L
    real = channel < C
    w, bias = _taps(w_ptr, b_ptr, channel, real, HAS_BIAS)
    p_ptr, u_ptr = p_ptr + FIRST, u_ptr + FIRST
    places = _places(rows_ptr, row, begin - 4, L, WIDTH, HAS_ROWS)
    parts = _parts(p_ptr, u_ptr, places, row, begin - 4, L, channel, real, STRIDE, HAS_U)
    x = (_sum(parts, 1, HAS_U), _sum(parts, 2, HAS_U), _sum(parts, 3, HAS_U))
    if HAS_TAIL:
        before = real & (begin == 0)
        tail = tail_ptr + tl.program_id(2).to(tl.int64) * 3 * C + channel
        x = (
            x[0] + tl.load(tail, mask=before, other=0.0).to(tl.float32),
            x[1] + tl.load(tail + C, mask=before, other=0.0).to(tl.float32),
            x[2] + tl.load(tail + 2 * C, mask=before, other=0.0).to(tl.float32),
        )
    places = _places(rows_ptr, row, begin, L, WIDTH, HAS_ROWS)
    later = _parts(p_ptr, u_ptr, places, row, begin, L, channel, real, STRIDE, HAS_U)
    places = _places(rows_ptr, row, begin + 4, L, WIDTH, HAS_ROWS)
    y_ptr += (row + begin) * C
    for group in tl.static_range(0, TOKENS, 4):
        now, then = later, begin + group + 4
        later = _parts(p_ptr, u_ptr, places, row, then, L, channel, real, STRIDE, HAS_U)
        places = _places(rows_ptr, row, then + 4, L, WIDTH, HAS_ROWS)
        for part in tl.static_range(4):
            step = group + part
            x3 = _sum(now, part, HAS_U)
            pre = bias + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x3
            y = pre * sigmoid(pre)
            tl.store(y_ptr + step * C + channel, y.to(y_ptr.dtype.element_ty), mask=real & (begin + step < L))
            x = (x[1], x[2], x3)


@triton.jit
def _conv_backward(
    p_ptr, u_ptr, rows_ptr, w_ptr, b_ptr, dy_ptr, dp_ptr, partial_ptr, L, C: tl.constexpr,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, HAS_U: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # dpre_t is the gradient before SiLU; dx_t = Σ_k w_{3-k} dpre_{t+k} needs three tokens after the block.
    begin = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64) * L
    real = channel < C
    w, bias = _taps(w_ptr, b_ptr, channel, real, HAS_BIAS)
    p_ptr, u_ptr = p_ptr + FIRST, u_ptr + FIRST
    end = tl.minimum(begin + TOKENS + 3, L)
    places = _places(rows_ptr, row, begin - 4, end, WIDTH, HAS_ROWS)
    parts = _parts(p_ptr, u_ptr, places, row, begin - 4, end, channel, real, STRIDE, HAS_U)
    x = (_sum(parts, 1, HAS_U), _sum(parts, 2, HAS_U), _sum(parts, 3, HAS_U))
    zero = tl.zeros((BLOCK,), tl.float32)
    d, dw, dbias = (zero, zero, zero), (zero, zero, zero, zero), zero
    places = _places(rows_ptr, row, begin, end, WIDTH, HAS_ROWS)
    later = _parts(p_ptr, u_ptr, places, row, begin, end, channel, real, STRIDE, HAS_U)
    later_dy, _ = _parts(dy_ptr, dy_ptr, places, row, begin, end, channel, real, C, False)
    places = _places(rows_ptr, row, begin + 4, end, WIDTH, HAS_ROWS)
    dp_ptr += (row + begin - 3) * WIDTH + FIRST
    for group in range(0, tl.minimum(TOKENS, L - begin) + 3, 4):
        now, now_dy, then = later, later_dy, begin + group + 4
        later = _parts(p_ptr, u_ptr, places, row, then, end, channel, real, STRIDE, HAS_U)
        later_dy, _ = _parts(dy_ptr, dy_ptr, places, row, then, end, channel, real, C, False)
        places = _places(rows_ptr, row, then + 4, end, WIDTH, HAS_ROWS)
        inside = tl.where(group < TOKENS, 1.0, 0.0)  # later tokens are in other programs' sums
        for part in tl.static_range(4):
            step = group + part
            x3 = _sum(now, part, HAS_U)
            pre = bias + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x3
            share = sigmoid(pre)
            d3 = now_dy[part].to(tl.float32) * share * (1.0 + pre * (1.0 - share))
            own = d3 * inside
            dw = (dw[0] + own * x[0], dw[1] + own * x[1], dw[2] + own * x[2], dw[3] + own * x3)
            dbias += own
            dx = w[3] * d[0] + w[2] * d[1] + w[1] * d[2] + w[0] * d3
            tl.store(
                dp_ptr + step * WIDTH + channel,
                dx.to(dp_ptr.dtype.element_ty),
                mask=real & (step >= 3) & (step < TOKENS + 3) & (begin + step - 3 < L),
            )
            x, d = (x[1], x[2], x3), (d[1], d[2], d3)
    run = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    partial_ptr += run * 5 * C + channel
    for n in tl.static_range(4):
        tl.store(partial_ptr + n * C, dw[n], mask=real)
    tl.store(partial_ptr + 4 * C, dbias, mask=real)
