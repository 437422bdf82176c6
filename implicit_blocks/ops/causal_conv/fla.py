"""The convolution by fla-core's Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from implicit_blocks.ops.accelerated import MOST_IN_GRID, package_refuses, require
from implicit_blocks.ops.backends import Backend, is_differentiated_forward
from implicit_blocks.ops.causal_conv import cuda

MODULE = "fla.modules.causal_conv1d"


def _refuses(x_BLC: Tensor, weight_CW: Tensor, documents_BL: Tensor | None) -> str:
    if reason := package_refuses(x_BLC, documents_BL):
        return reason
    if x_BLC.shape[0] > MOST_IN_GRID:
        return f"its kernels index at most {MOST_IN_GRID} rows"
    if is_differentiated_forward():
        return "its kernels have no forward-mode derivatives"
    return ""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled already; torch leaves it untyped
def convolve_fla(
    x_BLC: Tensor, tail_BWC: Tensor | None, weight_CW: Tensor, bias_C: Tensor | None, silu: bool
) -> Tensor:
    """Convolve, with SiLU on request; ``causal_conv`` documents arguments and results."""
    kernels = require(MODULE, package="fla-core")
    tail = None
    if tail_BWC is not None:  # it expects W inputs and does not read the first
        tail = functional.pad(tail_BWC.to(x_BLC.dtype), (0, 0, 1, 0)).transpose(1, 2).contiguous()
    y, _ = kernels.causal_conv1d(
        x_BLC,
        weight=weight_CW.to(x_BLC.dtype),
        bias=None if bias_C is None else bias_C.to(x_BLC.dtype),
        initial_state=tail,
        activation="silu" if silu else None,
    )
    found: Tensor = y
    return found


BACKEND = Backend("fla", convolve_fla, _refuses, cuda.pays, MODULE, "fla-core")
