"""The residual of each element from one pass over a point and its value.

The same in plain operators is ``implicit_blocks.solution``. Squares are float64, as there: float32 cannot
hold those of numbers above 2e19 or below 1e-23.

Shapes: E elements, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.solution import RELATIVE_FLOOR

BLOCK = 4096


def residuals(z_EF: Tensor, fz_EF: Tensor, *, scale: Tensor, relative: bool) -> tuple[Tensor, Tensor]:
    """Return the residuals, float32, and the updated scale of the elements; both with 1 in place of F.

    Inputs are (…, F), contiguous, on a GPU; ``scale`` (…, 1) is contiguous and float64. For an absolute
    residual the scale is returned unchanged.
    """
    features = z_EF.shape[-1]
    elements = z_EF.numel() // features
    block = min(BLOCK, triton.next_power_of_2(features))
    parts = triton.cdiv(features, block)
    found = torch.empty(*z_EF.shape[:-1], 1, dtype=torch.float32, device=z_EF.device)
    grown = torch.empty_like(scale) if relative else scale
    result = (found, scale, grown)
    with torch.cuda.device(z_EF.device):
        if parts == 1:
            _whole[(elements,)](
                z_EF, fz_EF, *result, features, RELATIVE_FLOOR, relative, BLOCK=block, num_warps=4
            )
            return found, grown
        sums = torch.empty(2, elements, parts, dtype=torch.float64, device=z_EF.device)
        # One grid dimension for both: the second one would limit the number of elements to 65,535.
        _partial[(elements * parts,)](
            z_EF, fz_EF, sums, features, parts, elements * parts, BLOCK=block, num_warps=4
        )
        width = min(1024, triton.next_power_of_2(parts))
        _finish[(elements,)](sums, *result, parts, elements * parts, RELATIVE_FLOOR, relative, BLOCK=width)
    return found, grown


@triton.jit
def relative_residual(step, size, scale, floor):
    """Return the quotient of these norms, float64, and the updated scale, as the torch function does.

    A NaN in a norm makes the quotient NaN, whatever the scale.
    """
    scale = tl.minimum(tl.maximum(size, scale), 1.0)
    return step / (size + floor * scale), scale


@triton.jit
def narrow(residual):
    """Return a residual in float32; one beyond its range stays finite."""
    large = (residual > 3.4028234663852886e38) & (residual < float("inf"))
    return tl.where(large, 3.4028234663852886e38, residual).to(tl.float32)


@triton.jit
def _squares(z_ptr, fz_ptr, element, feature, F):
    z = tl.load(z_ptr + element * F + feature, mask=feature < F, other=0.0).to(tl.float32)
    fz = tl.load(fz_ptr + element * F + feature, mask=feature < F, other=0.0).to(tl.float32)
    step = (fz - z).to(tl.float64)
    value = fz.to(tl.float64)
    return tl.sum(step * step), tl.sum(value * value)


@triton.jit
def _store(found_ptr, scale_ptr, grown_ptr, element, step, value, floor, RELATIVE: tl.constexpr):
    residual = tl.sqrt(step)
    if RELATIVE:
        residual, scale = relative_residual(residual, tl.sqrt(value), tl.load(scale_ptr + element), floor)
        tl.store(grown_ptr + element, scale)
    tl.store(found_ptr + element, narrow(residual))


@triton.jit
def _whole(
    z_ptr, fz_ptr, found_ptr, scale_ptr, grown_ptr, F, floor, RELATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    element = tl.program_id(0).to(tl.int64)
    step, value = _squares(z_ptr, fz_ptr, element, tl.arange(0, BLOCK), F)
    _store(found_ptr, scale_ptr, grown_ptr, element, step, value, floor, RELATIVE)


@triton.jit
def _partial(z_ptr, fz_ptr, sums_ptr, F, parts, stride, BLOCK: tl.constexpr):
    part = tl.program_id(0) % parts
    element = (tl.program_id(0) // parts).to(tl.int64)
    step, value = _squares(z_ptr, fz_ptr, element, part * BLOCK + tl.arange(0, BLOCK), F)
    at = sums_ptr + element * parts + part
    tl.store(at, step)
    tl.store(at + stride, value)


@triton.jit
def _finish(
    sums_ptr, found_ptr, scale_ptr, grown_ptr, parts, stride, floor, RELATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64)
    step = tl.zeros((BLOCK,), tl.float64)
    value = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = sums_ptr + element * parts + part
        step += tl.load(at, mask=part < parts, other=0.0)
        value += tl.load(at + stride, mask=part < parts, other=0.0)
    _store(found_ptr, scale_ptr, grown_ptr, element, tl.sum(step), tl.sum(value), floor, RELATIVE)
