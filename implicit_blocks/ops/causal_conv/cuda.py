"""The convolution by causal-conv1d's CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import available, load

MODULE = "causal_conv1d"
ALIGNMENT = 8  # strides must be multiples of this


def suits(x_BLC: Tensor, documents_BL: Tensor | None) -> bool:
    """Whether the kernels serve these inputs, and better than what a compiler makes of the plain operators.

    A compiler fuses those with what goes into the convolution, here the sum of projection and injection.
    """
    if torch.compiler.is_compiling():
        return False
    if not x_BLC.is_cuda or x_BLC.dtype == torch.float64 or documents_BL is not None:
        return False
    aligned = all(stride % ALIGNMENT == 0 for stride in x_BLC.stride()[:2])
    return x_BLC.stride(2) == 1 and aligned and available(MODULE)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled already; torch leaves it untyped
def convolve_cuda(
    x_BLC: Tensor, tail_BWC: Tensor | None, weight_CW: Tensor, bias_C: Tensor | None, silu: bool
) -> Tensor:
    """Convolve, SiLU included where asked for; ``causal_conv`` documents arguments and results."""
    kernels = load(MODULE)
    assert not isinstance(kernels, str)
    tail = None
    if tail_BWC is not None:
        tail = tail_BWC.to(x_BLC.dtype).contiguous().transpose(1, 2)
    y: Tensor = kernels.causal_conv1d_fn(
        x_BLC.transpose(1, 2),
        weight_CW.to(x_BLC.dtype),
        None if bias_C is None else bias_C.to(x_BLC.dtype),
        initial_states=tail,
        activation="silu" if silu else None,
    )
    return y.transpose(1, 2)
