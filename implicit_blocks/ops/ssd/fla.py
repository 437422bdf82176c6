"""The scan by fla-core's Triton kernels: SSD is their "simple GLA" with C as queries and B as keys.

``h_t = exp(g_t) h_{t-1} + k_t v_tᵀ``, ``o_t = h_tᵀ q_t`` with q = C, k = B, v = dt · x, g = A · dt, scale 1.
Each head has its own B and C, so those of a group are repeated, and dt · x is rounded to the inputs' dtype:
slightly slower and less exact than mamba-ssm's scan, but the package installs without a compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MOST_IN_GRID, fla_backward_is_wrong, package_refuses, require
from implicit_blocks.ops.backends import Backend, is_differentiated_forward
from implicit_blocks.ops.ssd import mamba_ssm

MODULE = "fla.ops.simple_gla"


def _refuses(x_BLHP: Tensor, initial_state_BHPN: Tensor | None, documents_BL: Tensor | None) -> str:
    if reason := package_refuses(x_BLHP, documents_BL):
        return reason
    batch, length, heads, _ = x_BLHP.shape
    if length > 1 and batch * heads > MOST_IN_GRID:
        return f"its kernels index at most {MOST_IN_GRID} heads of all rows"
    if is_differentiated_forward():
        return "its kernels have no forward-mode derivatives"
    if torch.is_grad_enabled() and x_BLHP.requires_grad and x_BLHP.shape[1] > 1 and fla_backward_is_wrong():
        return "its backward pass is wrong on Hopper GPUs with Triton before 3.7.1"
    return ""


def ssd_fla(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    initial_state_BHPN: Tensor | None,
    chunk_size: int,
    documents_BL: Tensor | None,
    initial_document_B: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scan; ``ssd`` documents arguments and results. The chunk is the kernels' own."""
    kernels = require(MODULE, package="fla-core")
    dtype, repeats = x_BLHP.dtype, x_BLHP.shape[2] // B_BLGN.shape[2]
    dt_BLH = dt_BLH.float()
    scan = kernels.fused_recurrent_simple_gla if x_BLHP.shape[1] == 1 else kernels.chunk_simple_gla
    y, state = scan(
        q=C_BLGN.to(dtype).repeat_interleave(repeats, dim=2),
        k=B_BLGN.to(dtype).repeat_interleave(repeats, dim=2),
        v=(x_BLHP * dt_BLH[..., None]).to(dtype),
        g=dt_BLH * A_H.float(),
        scale=1.0,
        initial_state=None if initial_state_BHPN is None else initial_state_BHPN.float(),
        output_final_state=return_final_state,
        state_v_first=True,
    )
    return y, state


BACKEND = Backend("fla", ssd_fla, _refuses, mamba_ssm.pays, MODULE, "fla-core")
