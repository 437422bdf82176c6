"""Decoding kernels for windows: a few tokens in each of a few rows, with as many kernels as single tokens.

The tokens of a call are the columns of one small matrix, so that every weight is read once for all of them:
a product is one of matrix units, whose unused columns cost nothing, because reading the weights takes longer.
Norms are applied around the product: the kernel that adds to the residual stream also writes the input of the
next product, scaled by the norm's weight, and partial sums of its squares, by whose mean the next kernel
divides its result.

Shape legend: S slots, R rows of a call, each in a slot; L tokens of a window, T = R · L tokens of a call, row
by row; K input, M output, D model width, X partial sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding import Mamba2Inputs
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous

COLUMNS = 8, 32  # columns of a product, of which the tokens of a call use the first


class Operand(NamedTuple):
    """The input of a product, (T, K) in the dtype of the computation; the divisor of its norm may be missing.

    With ``squares_TX``, partial sums of squares, the product is divided by the root of their sum divided by
    ``width``, plus ``eps``.
    """

    value_TK: Tensor
    squares_TX: Tensor | None = None
    width: int = 1
    eps: float = 0.0


class WindowConv(NamedTuple):
    """What the convolution of a window reads and writes besides its projection.

    ``own_TC`` holds the window's own inputs of the convolution, in the dtype of the slots' taps.
    """

    inputs: Mamba2Inputs
    rows_R: Tensor
    own_TC: Tensor


class Tiles(NamedTuple):
    """The tiles of a product: outputs of a program, parts of its inputs and their width, stages, warps.

    ``ahead`` is the number of tiles of weights that a program loads before its input is known; ``trigger`` is
    where the next kernel may start: 0, at once, 1, once the input is known, 2, after the loop.

    With ``direct``, the matrix units take both operands from the registers into which they were loaded, not
    from shared memory, so that all weights of a program can be loaded ahead. It is the number of tiles of 8
    tokens that are loaded at a time, and those after them are loaded before these are used; ``parts`` is the
    number of warps, ``inputs`` 32, and ``stages`` is not used.
    """

    outputs: int = 16
    parts: int = 4
    inputs: int = 64
    stages: int = 4
    warps: int = 4
    ahead: int = 1
    trigger: int = 2
    direct: int = 0


def tiles_of(outputs: int, width: int, tokens: int, *, wide: bool, gate: bool, conv: bool) -> Tiles:
    """Return the tiles of a product, by measurements of whole calls (benchmarks/NOTES.md).

    Args:
        outputs: of all programs.
        width: of the inputs.
        tokens: of the call.
        wide: for operands of more than 16 bits.
        gate: for two matrices.
        conv: with a convolution of the result.

    """
    if wide or tokens > 4 or not 2048 <= width <= 5632:  # not measured with operands in registers
        block = max(16, min(64, triton.next_power_of_2(triton.cdiv(width, 4))))
        if wide:
            return Tiles(inputs=block, stages=2)
        return Tiles(inputs=block, stages=3 if gate else 4, ahead=2, trigger=2 if conv else 0)
    if gate or conv or (width <= 2048 and outputs > 4096):
        return _direct(8, 4, 4, ahead=4, trigger=0 if gate else 2)
    if width > 4096:
        return _direct(16, 8, 8, ahead=22)
    return _direct(8, 8, 4, ahead=16) if width > 2048 else _direct(8, 4, 16, ahead=16)


def _direct(outputs: int, warps: int, at_once: int, *, ahead: int, trigger: int = 0) -> Tiles:
    return Tiles(outputs, warps, 32, 0, warps, ahead, trigger, at_once)


def linear_window(
    x: Operand,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    length: int,
    gate_MK: Tensor | None = None,
    gate_bias_M: Tensor | None = None,
    u_TM: Tensor | None = None,
    z_TM: Tensor | None = None,
    conv: WindowConv | None = None,
    next_norm_M: Tensor | None = None,
    next_eps: float = 0.0,
    dtype: torch.dtype = torch.float32,
    rounded: bool = False,
    out_TM: Tensor | None = None,
    tiles: Tiles | None = None,
    late: bool = False,
) -> tuple[Tensor, Operand | None]:
    """Return ``W x + b`` of all tokens, (T, M), and the next operand.

    Args:
        x: the input, contiguous.
        weight_MK: W, contiguous, of x's dtype.
        bias_M: b.
        length: L; T is a multiple of it.
        gate_MK: V: the result is ``silu(V x + c) · (W x + b)``, as in SwiGLU.
        gate_bias_M: c.
        u_TM: added.
        z_TM: float32, added.
        conv: applies Mamba2's convolution, SiLU and step size to the result.
        next_norm_M: the weight of the norm before the next product, whose operand is returned, in x's dtype.
        next_eps: that norm's.
        dtype: of the result.
        rounded: round the result to x's dtype first.
        out_TM: where the result is written, contiguous; None: a new tensor.
        tiles: instead of those for this shape.
        late: the next kernel reads states before it waits for this one (``ops.kernels.overlap``).

    """
    tokens, width = x.value_TK.shape
    outputs, device = weight_MK.shape[0], x.value_TK.device
    half = x.value_TK.dtype.itemsize <= 2
    columns = min(max(triton.next_power_of_2(tokens), COLUMNS[0]), COLUMNS[1])
    gate, convolves = gate_MK is not None, conv is not None
    chosen = tiles or tiles_of(outputs, width, tokens, wide=not half, gate=gate, conv=convolves)
    together = columns // length * length  # whole windows
    programs = triton.cdiv(outputs, chosen.outputs)
    out = torch.empty(tokens, outputs, dtype=dtype, device=device) if out_TM is None else out_TM
    following, squares = out, out
    if next_norm_M is not None:
        following = torch.empty(tokens, outputs, dtype=x.value_TK.dtype, device=device)
        squares = torch.empty(tokens, programs, dtype=torch.float32, device=device)
    parts = 0 if x.squares_TX is None else x.squares_TX.shape[1]
    unused: tuple[Tensor | int, ...] = (x.value_TK,) * 7 + (0, 0)
    conv_arguments = unused
    if conv is not None:
        conv_arguments = (conv.rows_R, conv.own_TC, *conv.inputs.pointers())
    with on_device(device):
        _linear_window[(programs, triton.cdiv(tokens, together))](
            x.value_TK,
            out if x.squares_TX is None else x.squares_TX,
            weight_MK,
            weight_MK if bias_M is None else bias_M,
            weight_MK if gate_MK is None else gate_MK,
            weight_MK if gate_bias_M is None else gate_bias_M,
            out if u_TM is None else u_TM,
            out if z_TM is None else z_TM,
            out if next_norm_M is None else next_norm_M,
            out,
            following,
            squares,
            tokens,
            outputs,
            together,
            x.width,
            x.eps,
            *conv_arguments,
            K=width,
            L=1 if conv is None else length,  # elsewhere not used, and a variant to compile
            PARTS=parts,
            BLOCK_X=1 if parts == 0 else triton.next_power_of_2(parts),
            HAS_BIAS=bias_M is not None,
            GATE=gate,
            HAS_GATE_BIAS=gate_bias_M is not None,
            HAS_U=u_TM is not None,
            HAS_Z=z_TM is not None,
            CONV=convolves,
            W=1 if conv is None else conv.inputs.taps,
            HAS_CONV_BIAS=conv is not None and conv.inputs.conv_bias_C is not None,
            NEXT=next_norm_M is not None,
            ROUNDED=rounded,
            PRECISION="tf32" if half else "ieee",  # of float32 operands alone
            BLOCK_M=chosen.outputs,
            BLOCK_T=columns,
            SPLIT=chosen.parts,
            BLOCK_K=chosen.inputs,
            STAGES=chosen.stages,
            AHEAD=min(chosen.ahead, triton.cdiv(width, chosen.parts * chosen.inputs)),
            TRIGGER=max(chosen.trigger, int(late)),
            DIRECT=chosen.direct and max(1, 8 * chosen.direct // columns),
            **overlapping(device),
            num_warps=chosen.warps,
        )
    if next_norm_M is None:
        return out, None
    return out, Operand(following, squares, outputs, next_eps)


@triton.jit
def _lines(LINES: tl.constexpr, DIRECT: tl.constexpr):
    """Return the numbers of a tile's lines, outputs or tokens: (1, LINES, 1), or (8, 1, LINES / 8, 1)."""
    if DIRECT > 0:
        eights = 8 * tl.arange(0, LINES // 8)
        return tl.arange(0, 8)[:, None, None, None] + eights[None, None, :, None]
    else:
        return tl.arange(0, LINES)[None, :, None]


@triton.jit
def _along(SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, DIRECT: tl.constexpr):
    """Return the inputs of the first tile: (SPLIT, 1, BLOCK_K), or (1, SPLIT, 1, BLOCK_K)."""
    part, inside = tl.arange(0, SPLIT) * BLOCK_K, tl.arange(0, BLOCK_K)
    along = part[:, None, None] + inside[None, None, :]
    return along[None, :, :, :] if DIRECT > 0 else along


@triton.jit
def _loaded(tiles, ptr, real, along, END: tl.constexpr, STEP: tl.constexpr, K: tl.constexpr):
    """Return the tiles with those up to ``END``, which are loaded."""
    for tile in tl.static_range(len(tiles), END):
        if tile * STEP < K:
            tiles += (tl.load(ptr + tile * STEP, mask=real & (tile * STEP + along < K), other=0.0),)
    return tiles


@triton.jit
def _product(w, x, total, PRECISION: tl.constexpr, DIRECT: tl.constexpr):
    """Return the sums of each part, (parts, outputs, tokens), with the products of two tiles."""
    if DIRECT > 0:
        w, x = _operand(w), tl.permute(_operand(x), (0, 2, 1))
    return tl.dot(w, x, total, input_precision=PRECISION)


@triton.jit
def _operand(tile):
    """Return a tile as (parts, lines, inputs), its inputs in the order in which matrix units take them.

    Lane ``4 line + q`` of a warp loads the inputs 8 q to 8 q + 7 of a line, 16 bytes, but an ``m16n8k16``
    takes 2 q, 2 q + 1, 2 q + 8, 2 q + 9 from it. In the same order in both operands, the inputs of a tile may
    have any; this one leaves each in its thread.
    """
    parts: tl.constexpr = tile.shape[1]
    lines: tl.constexpr = 8 * tile.shape[2]
    pairs = tl.permute(tile, (1, 2, 0, 3)).reshape(parts, lines, 4, 2, 2, 2)
    return tl.permute(pairs, (0, 1, 3, 4, 2, 5)).reshape(parts, lines, 32)


@triton.jit
def _linear_window(
    x_ptr, squares_ptr, w_ptr, bias_ptr, gate_ptr, gate_bias_ptr, u_ptr, z_ptr, next_norm_ptr, out_ptr,
    next_ptr, next_squares_ptr, T, M, together, norm_width, eps, rows_ptr, own_ptr, entries_ptr, taps_ptr,
    conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, K: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_X: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_U:
    tl.constexpr, HAS_Z: tl.constexpr, CONV: tl.constexpr, W: tl.constexpr, HAS_CONV_BIAS: tl.constexpr, NEXT:
    tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T:
    tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    TRIGGER: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if TRIGGER == 0:
        start_next(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_T)
    t = tl.program_id(1) * together + column
    real, used = m < M, (column < together) & (t < T)
    both = real[:, None] & used[None, :]
    place = t[None, :].to(tl.int64) * M + m[:, None]
    kind = x_ptr.dtype.element_ty
    # Weights and the states of earlier calls are loaded before the input is known.
    # The parts of the input are those of warps, each with its own sums.
    STEP: tl.constexpr = SPLIT * BLOCK_K
    along, output, token = _along(SPLIT, BLOCK_K, DIRECT), _lines(BLOCK_M, DIRECT), _lines(BLOCK_T, DIRECT)
    output += tl.program_id(0) * BLOCK_M
    read = output < M
    w_ptr += output.to(tl.int64) * K + along
    gate_ptr += output.to(tl.int64) * K + along
    along_x = along
    if DIRECT == 0:
        along_x, token = tl.permute(along, (0, 2, 1)), tl.permute(token, (0, 2, 1))
    taken = (token < together) & (tl.program_id(1) * together + token < T)
    x_ptr += (tl.program_id(1) * together + token).to(tl.int64) * K + along_x
    w_tiles, v_tiles = _loaded((), w_ptr, read, along, AHEAD, STEP, K), ()
    if GATE:
        v_tiles = _loaded((), gate_ptr, read, along, AHEAD, STEP, K)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + m, mask=real, other=0.0).to(tl.float32)
    if GATE and HAS_GATE_BIAS:
        gate_bias = tl.load(gate_bias_ptr + m, mask=real, other=0.0).to(tl.float32)
    if NEXT:
        next_norm = tl.load(next_norm_ptr + m, mask=real, other=0.0).to(tl.float32)
    if CONV:
        tl.debug_barrier()  # otherwise the assembler loads the weights after what depends on the slot
        channel = m - inner
        convolved = real & (channel >= 0) & (channel < C)
        stepped = real & (channel >= C)
        earlier = tl.load(dt_bias_ptr + channel - C, mask=stepped, other=0.0).to(tl.float32)
        if HAS_CONV_BIAS:
            earlier += tl.load(conv_bias_ptr + channel, mask=convolved, other=0.0).to(tl.float32)
        newest = tl.load(conv_ptr + (W - 1) * C + channel, mask=convolved, other=1.0).to(tl.float32)
        number = t % L  # in its window
        slot = tl.load(rows_ptr + t // L, mask=used, other=0)
        entry = tl.load(entries_ptr + slot, mask=used, other=0)
        in_row = convolved[:, None] & used[None, :]
        earlier = tl.zeros((BLOCK_M, BLOCK_T), tl.float32) + earlier[:, None]
        scales = ()
        for tap in tl.static_range(W - 1):  # the inputs of committed tokens
            scales += (tl.load(conv_ptr + tap * C + channel, mask=convolved, other=0.0).to(tl.float32),)
            at = (slot * W + (entry + 1 + tap + number) % W) * C
            before = (number + tap < W - 1)[None, :] & in_row
            value = tl.load(taps_ptr + at[None, :] + channel[:, None], mask=before, other=0.0)
            earlier += value.to(tl.float32) * scales[tap][:, None]
    wait_for_previous(PDL)
    if TRIGGER == 1:
        start_next(PDL)
    x_tiles = _loaded((), x_ptr, taken, along_x, AHEAD if DIRECT == 0 else DIRECT, STEP, K)
    # What follows the product is loaded before it, which hides its latency.
    added = tl.zeros((BLOCK_M, BLOCK_T), tl.float32)
    if HAS_U:
        added += tl.load(u_ptr + place, mask=both, other=0.0).to(tl.float32)
    if HAS_Z:
        added += tl.load(z_ptr + place, mask=both, other=0.0)
    if PARTS > 0:
        piece = tl.arange(0, BLOCK_X)
        mask = used[:, None] & (piece < PARTS)[None, :]
        squares = tl.load(squares_ptr + t[:, None] * PARTS + piece[None, :], mask=mask, other=0.0)
    total = tl.zeros((SPLIT, BLOCK_M, BLOCK_T), tl.float32)
    gate = tl.zeros((SPLIT, BLOCK_M, BLOCK_T), tl.float32)
    if DIRECT > 0:
        if TRIGGER == 2:
            start_next(PDL)
        y = tl.zeros((BLOCK_M, BLOCK_T), tl.float32)
        g = y
        for first in tl.static_range(0, (K + STEP - 1) // STEP, DIRECT):
            x_tiles = _loaded(x_tiles, x_ptr, taken, along, first + 2 * DIRECT, STEP, K)
            w_tiles = _loaded(w_tiles, w_ptr, read, along, first + 2 * DIRECT, STEP, K)
            if GATE:
                v_tiles = _loaded(v_tiles, gate_ptr, read, along, first + 2 * DIRECT, STEP, K)
            # Always: without a block of their own the assembler mixes products with the loads before them,
            # so that few loads run at a time. It needs the sums to be part of a short block.
            if T > 0:
                for tile in tl.static_range(first, first + DIRECT):
                    if tile * STEP < K:
                        total = _product(w_tiles[tile], x_tiles[tile], total, PRECISION, DIRECT)
                        if GATE:
                            gate = _product(v_tiles[tile], x_tiles[tile], gate, PRECISION, DIRECT)
                if (first + DIRECT) * STEP >= K:
                    y = tl.sum(total, axis=0)
                    if GATE:
                        g = tl.sum(gate, axis=0)
    else:
        for first in tl.range(AHEAD * STEP, K, STEP, num_stages=STAGES):
            x = tl.load(x_ptr + first, mask=taken & (first + along_x < K), other=0.0)
            w = tl.load(w_ptr + first, mask=read & (first + along < K), other=0.0)
            total = _product(w, x, total, PRECISION, DIRECT)
            if GATE:
                v = tl.load(gate_ptr + first, mask=read & (first + along < K), other=0.0)
                gate = _product(v, x, gate, PRECISION, DIRECT)
        if TRIGGER == 2:
            start_next(PDL)
        for tile in tl.static_range(AHEAD):
            total = _product(w_tiles[tile], x_tiles[tile], total, PRECISION, DIRECT)
            if GATE:
                gate = _product(v_tiles[tile], x_tiles[tile], gate, PRECISION, DIRECT)
        y = tl.sum(total, axis=0)
        if GATE:
            g = tl.sum(gate, axis=0)
    if PARTS > 0:
        divisor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / norm_width + eps)
        y *= divisor[None, :]
    if HAS_BIAS:
        y += bias[:, None]
    if GATE:
        if PARTS > 0:
            g *= divisor[None, :]
        if HAS_GATE_BIAS:
            g += gate_bias[:, None]
        y *= g * tl.sigmoid(g)
    y += added
    if CONV:
        own = y.to(own_ptr.dtype.element_ty)  # rounded as they will be once committed
        tl.store(own_ptr + t[None, :].to(tl.int64) * C + channel[:, None], own, mask=in_row)
        own = own.to(tl.float32)
        y = y * newest[:, None] + earlier
        for tap in tl.static_range(W - 1):
            source = tl.maximum(column - (W - 1 - tap), 0)  # each token reads those before it
            value = tl.gather(own, tl.broadcast_to(source[None, :], (BLOCK_M, BLOCK_T)), 1)
            after = (number + tap >= W - 1)[None, :] & in_row
            y += tl.where(after, value, 0.0) * scales[tap][:, None]
        softplus = tl.where(y > 20.0, y, tl.log(1.0 + tl.exp(y)))
        y = tl.where((channel >= C)[:, None], softplus, y * tl.sigmoid(y))
    if ROUNDED:
        y = y.to(kind).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=both)
    if NEXT:
        scaled = y * next_norm[:, None]
        tl.store(next_ptr + place, scaled.to(next_ptr.dtype.element_ty), mask=both)
        sums = tl.sum(tl.where(both, y * y, 0.0), axis=0)
        tl.store(next_squares_ptr + t * tl.num_programs(0) + tl.program_id(0), sums, mask=used)
