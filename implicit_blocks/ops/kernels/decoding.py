"""Decoding kernels: one token in each of a few rows, in three or five kernels per layer.

The necessary cost of a layer is reading its weights and states once; every further kernel adds its launch.
Therefore norms, injection, activation and residual are fused into the adjacent matrix product, and states
are written only when a token is committed.

Shape legend: S slots, R rows of a step, each in a slot; K input, M output, D model, F hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.instructions import NVIDIA
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous


class Mamba2Inputs(NamedTuple):
    """Parameters and buffers for Mamba2's convolution and step size, which follow its projection.

    ``entries_S`` int64 is the entry among the W of ``taps_SWC`` that the token of each slot is written to;
    the previous tokens are in the entries after it, the oldest first, cyclically. ``conv_weight_WC`` starts
    with the oldest tap; channels are contiguous.
    """

    entries_S: Tensor
    taps_SWC: Tensor
    conv_weight_WC: Tensor
    conv_bias_C: Tensor | None
    dt_bias_H: Tensor
    inner: int

    @property
    def taps(self) -> int:
        """W."""
        return self.taps_SWC.shape[1]

    def pointers(self) -> tuple[Tensor | int, ...]:
        """Return the arguments for kernels."""
        bias = self.dt_bias_H if self.conv_bias_C is None else self.conv_bias_C
        tensors = (self.entries_S, self.taps_SWC, self.conv_weight_WC, bias, self.dt_bias_H)
        return (*tensors, self.inner, self.taps_SWC.shape[2])


class Branch(NamedTuple):
    """A pending addition to the residual stream: ``value_RD``, possibly not normalized yet.

    With ``squares_RX`` it is a matrix product whose input lacks the divisor of an RMS norm over ``width``
    features with ``eps``; ``squares_RX`` are the partial sums of squares.
    """

    value_RD: Tensor
    squares_RX: Tensor | None = None
    width: int = 1
    eps: float = 0.0


class RowTiles(NamedTuple):
    """The tiles of a product row by row: outputs of a program, a power of 2 up to 16, warps, registers."""

    outputs: int = 4
    warps: int = 4
    registers: int | None = None  # at most


def row_tiles(outputs: int, width: int, dtype: torch.dtype, *, gate: bool, conv: bool) -> RowTiles:
    """Return the tiles of a product, by measurements of whole calls at 1.3B (benchmarks/NOTES.md).

    Args:
        outputs: of all programs.
        width: of the inputs.
        dtype: of the weights.
        gate: for two matrices.
        conv: with a convolution of the result.

    """
    warps = 4 if width <= 2048 else 8 if width <= 8192 else 16
    codes, few = dtype.itemsize == 1, outputs <= 4096 and not gate
    if outputs < 2048 or not 2048 <= width <= (5632 if few else 4096):  # not measured
        # Fewer registers let more programs run at the same time; none of these spills.
        return RowTiles(4, warps, (80 if gate else 64) if codes and width <= 3072 else None)
    if not codes:
        return RowTiles(8 if few and width <= 4096 else 4, warps)
    if conv:
        return RowTiles(4, warps)
    if few and dtype == torch.int8:
        return RowTiles(8, 4, 168 if width > 2048 else None)
    if few:
        return RowTiles(4, 4, 120) if width > 2048 else RowTiles(2, 4)
    return RowTiles(8, warps, 128 if gate else 80)


def linear_rows(
    x_RK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    gate_MK: Tensor | None = None,
    gate_bias_M: Tensor | None = None,
    scales_M: Tensor | None = None,
    gate_scales_M: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    u_SM: Tensor | None = None,
    rows_R: Tensor | None = None,
    z_RM: Tensor | None = None,
    mamba2: Mamba2Inputs | None = None,
    late: bool = False,
    tiles: RowTiles | None = None,
) -> Tensor:
    """Return ``W x + b``, (R, M) float32, row by row; intended for one or two rows.

    Sums are computed in float32; x is not rounded to the type of the weight.

    Args:
        x_RK: rows, contiguous, any floating type.
        weight_MK: W, contiguous, of any floating type, or 8-bit codes.
        bias_M: b.
        gate_MK: V: the result is ``silu(V x + c) · (W x + b)``, as in SwiGLU.
        gate_bias_M: c.
        scales_M: float32, of the rows of an 8-bit W (``ops.quantization``).
        gate_scales_M: those of an 8-bit V.
        norm_K: normalizes the input first: ``rms(x) · norm``.
        eps: of that norm.
        u_SM: injection; row ``rows_R`` is added.
        rows_R: int64, the slot of each row.
        z_RM: float32, added.
        mamba2: applies ``prepare_mamba2`` to the result.
        late: the next kernel reads states before it waits for this one (``ops.kernels.overlap``).
        tiles: instead of those for this shape.

    """
    rows, width = x_RK.shape
    outputs = weight_MK.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x_RK.device)
    tiles = tiles or row_tiles(
        outputs, width, weight_MK.dtype, gate=gate_MK is not None, conv=mamba2 is not None
    )
    with on_device(x_RK.device):
        _linear_rows[(rows, triton.cdiv(outputs, tiles.outputs))](
            x_RK,
            x_RK if norm_K is None else norm_K,
            weight_MK,
            weight_MK if bias_M is None else bias_M,
            weight_MK if gate_MK is None else gate_MK,
            weight_MK if gate_bias_M is None else gate_bias_M,
            x_RK if scales_M is None else scales_M,
            x_RK if gate_scales_M is None else gate_scales_M,
            x_RK if u_SM is None else u_SM,
            x_RK if rows_R is None else rows_R,
            x_RK if z_RM is None else z_RM,
            out,
            outputs,
            eps,
            *((x_RK,) * 5 + (0, 0) if mamba2 is None else mamba2.pointers()),
            K=width,
            NORM=norm_K is not None,
            HAS_BIAS=bias_M is not None,
            GATE=gate_MK is not None,
            HAS_GATE_BIAS=gate_bias_M is not None,
            SCALED=scales_M is not None,
            HAS_U=u_SM is not None,
            HAS_Z=z_RM is not None,
            MAMBA2=mamba2 is not None,
            W=1 if mamba2 is None else mamba2.taps,
            HAS_CONV_BIAS=mamba2 is not None and mamba2.conv_bias_C is not None,
            BLOCK_M=tiles.outputs,
            BLOCK_K=128 * tiles.warps,  # four for each thread
            DIGITS=weight_MK.dtype == torch.int8 and width % 16 == 0,
            LATE=late,
            **overlapping(x_RK.device),
            num_warps=tiles.warps,
            **({"maxnreg": tiles.registers} if tiles.registers and NVIDIA.value else {}),
        )
    return out


def add_norm(
    z_RD: Tensor,
    branch: Branch | None,
    weight_D: Tensor,
    *,
    eps: float,
    groups: int = 1,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return ``z + branch`` in z's type, z itself without a branch, and ``rms(z + branch) · w`` in ``dtype``.

    A branch without its divisor is divided first. With ``groups`` the mean square is computed for each of
    that many equal parts.
    """
    rows, width = z_RD.shape
    added = Branch(z_RD) if branch is None else branch
    squares = added.squares_RX
    total = z_RD if branch is None else torch.empty_like(z_RD)
    normed = torch.empty(rows, width, dtype=dtype, device=z_RD.device)
    part = width // groups
    block = triton.next_power_of_2(part)
    with on_device(z_RD.device):
        _add_norm[(rows, groups)](
            z_RD,
            added.value_RD,
            z_RD if squares is None else squares,
            weight_D,
            total,
            normed,
            width,
            part,
            eps,
            added.width,
            added.eps,
            HAS_BRANCH=branch is not None,
            PARTS=0 if squares is None else squares.shape[1],
            BLOCK_X=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
            BLOCK=block,
            **overlapping(z_RD.device),
            num_warps=min(16, max(1, block // 256)),
        )
    return total, normed


def silu_product(both_RF: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` of the two halves of each row; contiguous, of the same type."""
    rows, width = both_RF.shape
    out = torch.empty(rows, width // 2, dtype=both_RF.dtype, device=both_RF.device)
    with on_device(out.device):
        _silu_product[(triton.cdiv(width // 2, 1024), rows)](
            both_RF, out, width // 2, BLOCK=1024, **overlapping(out.device)
        )
    return out


@triton.jit
def mamba2_history(
    m, real, entry, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, W: tl.constexpr, HAS_BIAS:
    tl.constexpr,
):  # fmt: skip
    """Return the weight of the newest tap, and the sum over older taps; for dt, 1 and its bias."""
    channel = m - inner
    convolved = real & (channel >= 0) & (channel < C)
    newest = tl.load(conv_ptr + (W - 1) * C + channel, mask=convolved, other=1.0).to(tl.float32)
    step = real & (channel >= C)
    earlier = tl.load(dt_bias_ptr + channel - C, mask=step, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        place = taps_ptr + (entry + 1 + tap) % W * C + channel
        before = tl.load(place, mask=convolved, other=0.0).to(tl.float32)
        earlier += before * tl.load(conv_ptr + tap * C + channel, mask=convolved, other=0.0).to(tl.float32)
    if HAS_BIAS:
        earlier += tl.load(conv_bias_ptr + channel, mask=convolved, other=0.0).to(tl.float32)
    return newest, earlier


@triton.jit
def mamba2_prepared(y, newest, earlier, m, real, entry_ptr, inner, C):
    """Write the convolution's input; return silu of gate and convolution, and softplus of dt."""
    channel = m - inner
    # The entry of the token itself, which is read only after the token is committed.
    convolved = real & (channel >= 0) & (channel < C)
    tl.store(entry_ptr + channel, y.to(entry_ptr.dtype.element_ty), mask=convolved)
    y = y * newest + earlier
    softplus = tl.where(y > 20.0, y, tl.log(1.0 + tl.exp(y)))
    return tl.where(channel >= C, softplus, y * tl.sigmoid(y))


@triton.jit
def _tile(ptr, first: tl.constexpr, column, K: tl.constexpr):
    """Load elements ``first`` to ``first + BLOCK_K`` of a vector of K.

    Each thread gets the same four elements of an input and of every row of weights, so that the input is not
    exchanged between threads, which would take several barriers while all weights are waiting.
    """
    if first + column.shape[0] <= K:
        return tl.load(ptr + first + column)
    return tl.load(ptr + first + column, mask=first + column < K, other=0.0)


@triton.jit
def _row(w_tiles, x_tiles, unit, output: tl.constexpr, OUTPUTS: tl.constexpr, TILES: tl.constexpr):
    """Return the products of a row of weights with the input, summed over the tiles.

    Without ``unit`` there is one sum per element of a tile. Otherwise the input is given as ``_digits``
    returns it, and there is one sum per four elements.
    """
    if unit is None:
        total = w_tiles[output].to(tl.float32) * x_tiles[0]
        for tile in tl.static_range(1, TILES):
            total += w_tiles[tile * OUTPUTS + output].to(tl.float32) * x_tiles[tile]
        return total
    else:
        block: tl.constexpr = w_tiles[0].shape[0]
        high, low = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.int32)
        for tile in tl.static_range(TILES):
            high = _add_products(high, w_tiles[tile * OUTPUTS + output], x_tiles[2 * tile])
            low = _add_products(low, w_tiles[tile * OUTPUTS + output], x_tiles[2 * tile + 1])
        return tl.sum((high * 256 + low).reshape(block // 4, 4), axis=1).to(tl.float32) * unit


@triton.jit
def _digits(x_tiles, TILES: tl.constexpr):
    """Return inputs as integers of 16 bits, two digits of 8 bits each, and their unit for four at a time.

    A multiprocessor adds four products of 8 bits by one instruction, but converts a code to float32 by two or
    three. The same four inputs of all tiles, those of one thread, have the same unit. NaN makes it NaN.
    """
    block: tl.constexpr = x_tiles[0].shape[0]
    largest = tl.zeros((block // 4,), tl.int32)
    for tile in tl.static_range(TILES):
        bits = tl.abs(x_tiles[tile]).to(tl.int32, bitcast=True)  # in the order of the numbers, NaN last
        largest = tl.maximum(largest, tl.max(bits.reshape(block // 4, 4), axis=1))
    largest = largest.to(tl.float32, bitcast=True)
    digits = ()
    for tile in tl.static_range(TILES):
        # The sum of an integer and 3 · 2²² has it in its lowest bits.
        whole = x_tiles[tile].reshape(block // 4, 4) * (32512.0 / largest)[:, None] + 12582912.0
        whole = whole.reshape(block).to(tl.int32, bitcast=True)
        digits += (((whole + 128) >> 8).to(tl.int8), whole.to(tl.int8))
    return digits, largest / 32512.0


@triton.jit
def _add_products(total, w, x):
    """Add the products of 8-bit integers; on Nvidia's GPUs four of a thread to the first of them."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $8, $9, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [total, w, x],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    return total + w.to(tl.int32) * x.to(tl.int32)


@triton.jit
def _sums(rows, COUNT: tl.constexpr):
    """Return the sum of each of ``COUNT`` rows, a power of 2 up to 16."""
    if COUNT > 8:
        rows = _pairs(rows, COUNT // 2)
    if COUNT > 4:
        rows = _pairs(rows, 4)
    if COUNT > 2:
        rows = _pairs(rows, 2)
    if COUNT > 1:
        rows = _pairs(rows, 1)
    return tl.sum(rows[0], axis=0)


@triton.jit
def _pairs(rows, HALF: tl.constexpr):
    """Return twice as many columns in half as many matrices, those of the first half before the others."""
    pairs = ()
    for number in tl.static_range(HALF):
        both = tl.join(rows[number], rows[number + HALF])
        pairs += (both.reshape(both.shape[0], both.numel // both.shape[0]),)
    return pairs


@triton.jit
def _linear_rows(
    x_ptr, norm_ptr, w_ptr, bias_ptr, gate_ptr, gate_bias_ptr, scales_ptr, gate_scales_ptr, u_ptr, rows_ptr,
    z_ptr, out_ptr, M, eps, entries_ptr, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, K:
    tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_GATE_BIAS: tl.constexpr,
    SCALED: tl.constexpr, HAS_U: tl.constexpr, HAS_Z: tl.constexpr, MAMBA2: tl.constexpr, W: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DIGITS: tl.constexpr, LATE:
    tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < M
    column = tl.arange(0, BLOCK_K)
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # Weights and the states of earlier calls are loaded before the input is known.
    w_tiles, v_tiles, norm_tiles = (), (), ()
    for tile in tl.static_range(TILES):
        for output in tl.static_range(BLOCK_M):
            place = tl.minimum(tl.program_id(1) * BLOCK_M + output, M - 1).to(tl.int64) * K
            w_tiles += (_tile(w_ptr + place, tile * BLOCK_K, column, K),)
            if GATE:
                v_tiles += (_tile(gate_ptr + place, tile * BLOCK_K, column, K),)
        if NORM:
            norm_tiles += (_tile(norm_ptr, tile * BLOCK_K, column, K),)
    slot = row
    if HAS_U or MAMBA2:
        tl.debug_barrier()  # otherwise the compiler loads the weights after what depends on the slot
        slot = tl.load(rows_ptr + row)
    added = tl.zeros((BLOCK_M,), tl.float32)
    bias, gate_bias = added, added
    if HAS_U:
        added += tl.load(u_ptr + slot * M + m, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + m, mask=real, other=0.0).to(tl.float32)
    if HAS_GATE_BIAS:
        gate_bias = tl.load(gate_bias_ptr + m, mask=real, other=0.0).to(tl.float32)
    if SCALED:
        scales = tl.load(scales_ptr + m, mask=real, other=0.0)
        if GATE:
            gate_scales = tl.load(gate_scales_ptr + m, mask=real, other=0.0)
    if MAMBA2:
        entry = tl.load(entries_ptr + slot)
        taps_ptr += slot * W * C
        newest, earlier = mamba2_history(
            m, real, entry, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, W, HAS_CONV_BIAS
        )
    wait_for_previous(PDL)
    if LATE:
        start_next(PDL)
    x_tiles = ()
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for tile in tl.static_range(TILES):
        x = _tile(x_ptr + row * K, tile * BLOCK_K, column, K).to(tl.float32)
        if NORM:
            # The norm's divisor is one number per row, so the product need not wait for it.
            squares += x * x
            x *= norm_tiles[tile].to(tl.float32)
        x_tiles += (x,)
    if HAS_Z:
        added += tl.load(z_ptr + row * M + m, mask=real, other=0.0)
    unit = None
    if DIGITS:
        x_tiles, unit = _digits(x_tiles, TILES)
    totals, gates = (), ()
    for output in tl.static_range(BLOCK_M):
        totals += (_row(w_tiles, x_tiles, unit, output, BLOCK_M, TILES),)
        if GATE:
            gates += (_row(v_tiles, x_tiles, unit, output, BLOCK_M, TILES),)
    y = _sums(totals, BLOCK_M)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
        y *= scale
    if SCALED:
        y *= scales
    y += bias
    if GATE:
        g = _sums(gates, BLOCK_M) * scale
        if SCALED:
            g *= gate_scales
        g += gate_bias
        y *= g * tl.sigmoid(g)
    y += added
    if MAMBA2:
        y = mamba2_prepared(y, newest, earlier, m, real, taps_ptr + entry * C, inner, C)
    tl.store(out_ptr + row * M + m, y, mask=real)


@triton.jit
def _add_norm(
    z_ptr, branch_ptr, squares_ptr, w_ptr, total_ptr, out_ptr, D, part, eps, branch_width, branch_eps,
    HAS_BRANCH: tl.constexpr, PARTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr, PDL:
    tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    place = tl.arange(0, BLOCK)
    real = place < part
    column = tl.program_id(1) * part + place
    w = tl.load(w_ptr + column, mask=real, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    z = tl.load(z_ptr + row + column, mask=real, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + row + column, mask=real, other=0.0).to(tl.float32)
        if PARTS > 0:
            piece = tl.arange(0, BLOCK_X)
            squares = tl.load(squares_ptr + tl.program_id(0) * PARTS + piece, mask=piece < PARTS, other=0.0)
            branch *= 1.0 / tl.sqrt(tl.sum(squares) / branch_width + branch_eps)
        z += branch
        tl.store(total_ptr + row + column, z, mask=real)
    scale = 1.0 / tl.sqrt(tl.sum(z * z) / part + eps)
    tl.store(out_ptr + row + column, (z * scale * w).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _silu_product(both_ptr, out_ptr, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < F
    gate = tl.load(both_ptr + 2 * row * F + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + (2 * row + 1) * F + place, mask=real, other=0.0).to(tl.float32)
    value = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * F + place, value, mask=real)
