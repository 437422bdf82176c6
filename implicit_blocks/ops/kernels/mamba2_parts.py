"""Mamba2's gated norm and its gradient, and how kernels add the injection to the projection.

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
from implicit_blocks.ops.kernels.instructions import sigmoid

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
            *(inner, inner // groups, projected_BLU.stride(1), projected_BLU.shape[2], eps),
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
            *(inner, inner // groups, projected_BLU.stride(1), projected_BLU.shape[2], eps),
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
    p_ptr, u_ptr, rows_ptr, token, real, stride, width, column, mask,
    HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    # ``token`` counts over all rows of the batch, in 64 bits; ``real`` masks out-of-range tokens.
    value = tl.load(p_ptr + token * stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_U:
        place = token
        if HAS_ROWS:
            place = tl.load(rows_ptr + token, mask=real, other=0)
        value += tl.load(u_ptr + place * width + column, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _gated_norm_forward(
    y_ptr, p_ptr, u_ptr, rows_ptr, w_ptr, out_ptr, scales_ptr, inner, part, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, eps, HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    real = entry < part
    column = tl.program_id(1) * part + entry
    gate = _load_sum(p_ptr, u_ptr, rows_ptr, token, True, STRIDE, WIDTH, column, real, HAS_U, HAS_ROWS)
    value = tl.load(y_ptr + token * inner + column, mask=real, other=0.0).to(tl.float32)
    value *= gate * sigmoid(gate)
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
    dout_ptr, y_ptr, p_ptr, u_ptr, rows_ptr, w_ptr, dy_ptr, dp_ptr, partial_ptr, tokens, inner, part,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, eps, HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr,
    AGAIN: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.arange(0, BLOCK)
    real = entry < part
    column = tl.program_id(1) * part + entry
    weight = tl.load(w_ptr + column, mask=real, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(step, tl.int64)
        gate = _load_sum(p_ptr, u_ptr, rows_ptr, token, True, STRIDE, WIDTH, column, real, HAS_U, HAS_ROWS)
        y = tl.load(y_ptr + token * inner + column, mask=real, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + token * inner + column, mask=real, other=0.0).to(tl.float32)
        share = sigmoid(gate)
        silu = gate * share
        value = y * silu
        scale = tl.rsqrt(tl.sum(value * value) / part + eps)
        normed = value * scale
        dweight += dout * normed
        dnormed = dout * weight
        dvalue = scale * (dnormed - normed * (tl.sum(dnormed * normed) / part))
        tl.store(dy_ptr + token * inner + column, (dvalue * silu).to(dy_ptr.dtype.element_ty), mask=real)
        dgate = dvalue * y * share * (1.0 + gate * (1.0 - share))
        tl.store(dp_ptr + token * WIDTH + column, dgate.to(dp_ptr.dtype.element_ty), mask=real)
        if AGAIN:
            out = normed * weight
            tl.store(dout_ptr + token * inner + column, out.to(dout_ptr.dtype.element_ty), mask=real)
    tl.store(partial_ptr + tl.program_id(0) * inner + column, dweight, mask=real)
