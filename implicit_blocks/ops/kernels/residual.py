"""The residual of each element, from one pass over a point and its value.

Shapes: E elements, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def residuals(z_EF: Tensor, fz_EF: Tensor, *, floor: float | None) -> Tensor:
    """Return ``‖f(z) − z‖ / (‖f(z)‖ + floor)``, or with None the numerator, float32, with 1 in F's place.

    Inputs are (…, F), contiguous, on a GPU. Sums are added up in float32 in an order of their own.
    """
    features = z_EF.shape[-1]
    elements = z_EF.numel() // features
    block = min(BLOCK, triton.next_power_of_2(features))
    parts = triton.cdiv(features, block)
    found = torch.empty(*z_EF.shape[:-1], 1, dtype=torch.float32, device=z_EF.device)
    relative = floor is not None
    with torch.cuda.device(z_EF.device):
        if parts == 1:
            _whole[(elements,)](
                z_EF, fz_EF, found, features, floor or 0.0, relative, BLOCK=block, num_warps=4
            )
            return found
        sums = torch.empty(2, elements, parts, dtype=torch.float32, device=z_EF.device)
        # One number counts both: in a grid of two the second, of elements, may reach no more than 65 535.
        _partial[(elements * parts,)](
            z_EF, fz_EF, sums, features, parts, elements * parts, BLOCK=block, num_warps=4
        )
        width = min(1024, triton.next_power_of_2(parts))
        _finish[(elements,)](sums, found, parts, elements * parts, floor or 0.0, relative, BLOCK=width)
    return found


@triton.jit
def _squares(z_ptr, fz_ptr, element, feature, F):
    z = tl.load(z_ptr + element * F + feature, mask=feature < F, other=0.0).to(tl.float32)
    fz = tl.load(fz_ptr + element * F + feature, mask=feature < F, other=0.0).to(tl.float32)
    step = fz - z
    return tl.sum(step * step), tl.sum(fz * fz)


@triton.jit
def _residual(step, value, floor, RELATIVE: tl.constexpr):
    residual = tl.sqrt(step)
    if RELATIVE:
        residual = residual / (tl.sqrt(value) + floor)
    return residual


@triton.jit
def _whole(z_ptr, fz_ptr, found_ptr, F, floor, RELATIVE: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64)
    step, value = _squares(z_ptr, fz_ptr, element, tl.arange(0, BLOCK), F)
    tl.store(found_ptr + element, _residual(step, value, floor, RELATIVE))


@triton.jit
def _partial(z_ptr, fz_ptr, sums_ptr, F, parts, stride, BLOCK: tl.constexpr):
    part = tl.program_id(0) % parts
    element = (tl.program_id(0) // parts).to(tl.int64)
    step, value = _squares(z_ptr, fz_ptr, element, part * BLOCK + tl.arange(0, BLOCK), F)
    at = sums_ptr + element * parts + part
    tl.store(at, step)
    tl.store(at + stride, value)


@triton.jit
def _finish(sums_ptr, found_ptr, parts, stride, floor, RELATIVE: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64)
    step = tl.zeros((BLOCK,), tl.float32)
    value = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = sums_ptr + element * parts + part
        step += tl.load(at, mask=part < parts, other=0.0)
        value += tl.load(at + stride, mask=part < parts, other=0.0)
    tl.store(found_ptr + element, _residual(tl.sum(step), tl.sum(value), floor, RELATIVE))
