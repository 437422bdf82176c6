"""Mamba2 from its input projection to its output, with the output projection in 8-bit floats.

As ``mamba2_mix`` without gradients: the kernel of the gated norm writes 8-bit floats, which a separate kernel
would read and write again.

Shapes: B batch, L tokens, U projection width, D model width; the rest as in ``mamba2_mix``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.backends import note, without_autocast
from implicit_blocks.ops.float8 import Float8Weight, float8_product
from implicit_blocks.ops.mamba2_mix import Mamba2Sizes, Mamba2Weights, as_added, scanned, sizes_of

__all__ = ["mamba2_float8"]


def mamba2_float8(
    projected_BLU: Tensor,
    u: Tensor | None,
    *,
    rows_BL: Tensor | None,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
    out_weight_DI: Float8Weight,
    out_bias_D: Tensor | None,
) -> Tensor:
    """Return the output of the mixer, (B, L, D). The norm has one group.

    Args:
        projected_BLU: the output of the input projection, in bfloat16 or float16.
        u: the injection, added to it, (B, L, U), or (V, U) with ``rows_BL``; None: nothing.
        rows_BL: int64, the row of ``u`` of each token; None: ``u`` has one row per token.
        weights: those between the projections.
        sizes: the division of the projection.
        out_weight_DI: the weight of the output projection.
        out_bias_D: the bias of the output projection, or None.

    """
    length = projected_BLU.shape[1]
    note("mamba2 between its projections", "our Triton kernels")
    u = as_added(u, projected_BLU, rows_BL)
    if projected_BLU.stride(2) != 1 or projected_BLU.stride(0) != length * projected_BLU.stride(1):
        projected_BLU = (
            projected_BLU.contiguous()
        )  # others are wider rows, of which the last columns are left out
    out: Tensor = _mix(
        projected_BLU,
        u,
        None if rows_BL is None else rows_BL.contiguous(),
        *weights,
        out_weight_DI.codes,
        out_weight_DI.scales,
        out_bias_D,
        list(sizes[:5]),
        sizes.norm_eps,
    )
    return out


@torch.library.custom_op("implicit_blocks::mamba2_float8", mutates_args=())
def _mix(
    projected: Tensor,
    u: Tensor | None,
    rows: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    out_bias: Tensor | None,
    sizes: list[int],
    eps: float,
) -> Tensor:
    from implicit_blocks.ops.kernels import mamba2_parts

    shape = sizes_of(sizes, eps)
    with without_autocast("cuda"):
        added = mamba2_parts.Added(u, rows)
        y, _ = scanned(projected, added, conv_weight, conv_bias, dt_bias, A_log, D, shape, False)
        scales = torch.empty(*projected.shape[:2], 1, dtype=torch.float32, device=projected.device)
        codes = mamba2_parts.gated_norm_forward(
            y, projected, added, norm_weight, eps=eps, groups=shape.norm_groups, scales_BL=scales
        )
        weight = Float8Weight(out_codes, out_scales, projected.dtype, len(out_codes))
        return float8_product(codes, scales, weight, out_bias)


@_mix.register_fake
def _(projected: Tensor, *others: object) -> Tensor:
    out_codes = others[8]
    assert isinstance(out_codes, Tensor)
    return projected.new_empty(*projected.shape[:2], out_codes.shape[0])
