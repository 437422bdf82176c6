"""The convolution by causal-conv1d's CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import package_refuses, require
from implicit_blocks.ops.backends import Backend, is_differentiated_forward, is_transformed

MODULE = "causal_conv1d"
ALIGNMENT = 8  # strides must be multiples of this; other inputs are copied
MOST_TAPS = 4


def _refuses(x_BLC: Tensor, weight_CW: Tensor, documents_BL: Tensor | None) -> str:
    if reason := package_refuses(x_BLC, documents_BL):
        return reason
    if not 2 <= weight_CW.shape[1] <= MOST_TAPS:
        return f"it supports 2 to {MOST_TAPS} taps"
    if x_BLC.shape[2] % ALIGNMENT:
        return f"the number of channels must be a multiple of {ALIGNMENT}"
    if is_differentiated_forward():
        return "its kernels have no forward-mode derivatives"
    return ""


def pays(x_BLC: Tensor, weight_CW: Tensor, documents_BL: Tensor | None) -> bool:
    """Whether a library's kernel is faster than the plain operators.

    It is not under a compiler, which fuses the plain operators with the sum of projection and injection that
    is the input of the convolution.
    """
    return not is_transformed()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled already; torch leaves it untyped
def convolve_cuda(
    x_BLC: Tensor, tail_BWC: Tensor | None, weight_CW: Tensor, bias_C: Tensor | None, silu: bool
) -> Tensor:
    """Convolve, with SiLU on request; ``causal_conv`` documents arguments and results."""
    kernels = require(MODULE, package="causal-conv1d")
    if not _aligned(x_BLC):
        x_BLC = x_BLC.contiguous()
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


def _aligned(x_BLC: Tensor) -> bool:
    return x_BLC.stride(2) == 1 and not any(stride % ALIGNMENT for stride in x_BLC.stride()[:2])


def _pays(x_BLC: Tensor, weight_CW: Tensor, documents_BL: Tensor | None) -> bool:
    return _aligned(x_BLC) and pays(x_BLC, weight_CW, documents_BL)


BACKEND = Backend("causal-conv1d", convolve_cuda, _refuses, _pays, MODULE, "causal-conv1d")
