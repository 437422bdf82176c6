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

from implicit_blocks.ops.kernels.overlap import (
    on_device,
    overlapping,
    start_next,
    wait_for_previous,
)


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
    """The tiles of a product row by row: outputs of a program, inputs of a tile, warps."""

    outputs: int = 4
    inputs: int = 2048
    warps: int = 4


def row_tiles(width: int, *, gate: bool, mamba2: bool) -> RowTiles:
    """Return the tiles of a product, by measurements of whole calls (benchmarks/NOTES.md).

    Args:
        width: of the inputs.
        gate: for two matrices.
        mamba2: with a convolution of the result.

    """
    if mamba2:
        return RowTiles(4, min(2048, triton.next_power_of_2(width)))
    if 2048 < width <= 4096:
        return RowTiles(8, 1024, 8)
    return RowTiles(4 if gate else 8, min(1024, triton.next_power_of_2(width)))


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
) -> Tensor:
    """Return ``W x + b``, (R, M) float32, row by row; intended for one or two rows.

    Sums are computed in float32; x is not rounded to the type of the weight.

    Args:
        x_RK: rows, contiguous, any floating type.
        weight_MK: W, contiguous.
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

    """
    rows, width = x_RK.shape
    outputs = weight_MK.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x_RK.device)
    tiles = row_tiles(width, gate=gate_MK is not None, mamba2=mamba2 is not None)
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
            BLOCK_K=tiles.inputs,
            LATE=late,
            **overlapping(x_RK.device),
            num_warps=tiles.warps,
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
def _linear_rows(
    x_ptr, norm_ptr, w_ptr, bias_ptr, gate_ptr, gate_bias_ptr, scales_ptr, gate_scales_ptr, u_ptr, rows_ptr,
    z_ptr, out_ptr, M, eps, entries_ptr, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, K:
    tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_GATE_BIAS: tl.constexpr,
    SCALED: tl.constexpr, HAS_U: tl.constexpr, HAS_Z: tl.constexpr, MAMBA2: tl.constexpr, W: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LATE: tl.constexpr, PDL:
    tl.constexpr,
):  # fmt: skip
    if not LATE:
        start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < M
    column = tl.arange(0, BLOCK_K)
    weight = m[:, None].to(tl.int64) * K + column[None, :]
    # Weights and the states of earlier calls are loaded before the input is known.
    inside = column < K
    both = real[:, None] & inside[None, :]
    w_first = tl.load(w_ptr + weight, mask=both, other=0.0)
    if GATE:
        v_first = tl.load(gate_ptr + weight, mask=both, other=0.0)
    if NORM:
        norm_first = tl.load(norm_ptr + column, mask=inside, other=0.0)
    slot = row
    if HAS_U or MAMBA2:
        slot = tl.load(rows_ptr + row)
    if MAMBA2:
        entry = tl.load(entries_ptr + slot)
        taps_ptr += slot * W * C
        newest, earlier = mamba2_history(
            m, real, entry, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, W, HAS_CONV_BIAS
        )
    wait_for_previous(PDL)
    if LATE:
        start_next(PDL)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        inside = first + column < K
        both = real[:, None] & inside[None, :]
        if first == 0:
            w = w_first.to(tl.float32)
        else:
            w = tl.load(w_ptr + weight + first, mask=both, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * K + first + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            # The norm's divisor is one number per row, so the product need not wait for it.
            squares += x * x
            if first == 0:
                x *= norm_first.to(tl.float32)
            else:
                x *= tl.load(norm_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
        total += w * x[None, :]
        if GATE:
            if first == 0:
                v = v_first.to(tl.float32)
            else:
                v = tl.load(gate_ptr + weight + first, mask=both, other=0.0).to(tl.float32)
            gate += v * x[None, :]
    y = tl.sum(total, axis=1)
    if SCALED:
        y *= tl.load(scales_ptr + m, mask=real, other=0.0)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
        y *= scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + m, mask=real, other=0.0).to(tl.float32)
    if GATE:
        g = tl.sum(gate, axis=1) * scale
        if SCALED:
            g *= tl.load(gate_scales_ptr + m, mask=real, other=0.0)
        if HAS_GATE_BIAS:
            g += tl.load(gate_bias_ptr + m, mask=real, other=0.0).to(tl.float32)
        y *= g * tl.sigmoid(g)
    if HAS_U:
        y += tl.load(u_ptr + slot * M + m, mask=real, other=0.0).to(tl.float32)
    if HAS_Z:
        y += tl.load(z_ptr + row * M + m, mask=real, other=0.0)
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
