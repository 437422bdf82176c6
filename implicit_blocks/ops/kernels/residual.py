"""The squared norms of a step and of its value, for each element, in one pass over both.

Shapes: E elements, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def squared_norms(z_EF: Tensor, fz_EF: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``‖f(z) − z‖²`` and ``‖f(z)‖²``, each (E,) float32; inputs contiguous, on a GPU."""
    elements, features = z_EF.shape
    block = min(BLOCK, triton.next_power_of_2(features))
    parts = triton.cdiv(features, block)
    sums = torch.empty(2, elements, parts, dtype=torch.float32, device=z_EF.device)
    with torch.cuda.device(z_EF.device):
        _partial[(parts, elements)](z_EF, fz_EF, sums, features, elements * parts, BLOCK=block, num_warps=4)
    step, value = sums.sum(2).unbind(0)
    return step, value


@triton.jit
def _partial(z_ptr, fz_ptr, sums_ptr, F, stride, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    element = tl.program_id(1).to(tl.int64)
    feature = part * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + element * F + feature, mask=feature < F, other=0.0).to(tl.float32)
    fz = tl.load(fz_ptr + element * F + feature, mask=feature < F, other=0.0).to(tl.float32)
    step = fz - z
    at = sums_ptr + element * tl.num_programs(0) + part
    tl.store(at, tl.sum(step * step))
    tl.store(at + stride, tl.sum(fz * fz))
