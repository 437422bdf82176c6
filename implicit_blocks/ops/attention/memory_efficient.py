"""Attention by xformers, which selects among its own flash kernels."""

from __future__ import annotations

from torch import Tensor

from implicit_blocks.ops.accelerated import require
from implicit_blocks.ops.attention import flash
from implicit_blocks.ops.attention.flex import Blocks
from implicit_blocks.ops.backends import Backend

MODULE = "xformers.ops"


def _attend(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> Tensor:
    kernels = require(MODULE, package="xformers")
    group = q_BHLP.shape[1] // k_BKTP.shape[1]
    if group > 1:  # grouped heads have no backward pass in xformers
        k_BKTP, v_BKTP = (t.repeat_interleave(group, dim=1) for t in (k_BKTP, v_BKTP))
    q, k, v = (t.transpose(1, 2) for t in (q_BHLP, k_BKTP, v_BKTP))
    seen = kernels.fmha.attn_bias.LowerTriangularFromBottomRightMask() if causal else None
    try:
        y: Tensor = kernels.memory_efficient_attention(q, k, v, attn_bias=seen)
    except NotImplementedError as error:  # for instance if it was built for another version of torch
        raise ValueError(
            f"attention backend 'xformers' has no kernel for these inputs ({error}); choose another one. If "
            "it has none at all, its wheel may lack libcudart.so.12: install nvidia-cuda-runtime-cu12, and "
            "add the package's nvidia/cuda_runtime/lib to LD_LIBRARY_PATH (XFORMERS_MORE_DETAILS=1 shows why)"
        ) from error
    return y.transpose(1, 2)


BACKEND = Backend("xformers", _attend, flash.refuses, lambda *inputs: False, MODULE, "xformers")
