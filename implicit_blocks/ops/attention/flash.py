"""Attention by flash-attn's CUDA kernels: T. Dao, "FlashAttention-2", 2023."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import require
from implicit_blocks.ops.attention import after
from implicit_blocks.ops.attention.flex import Blocks
from implicit_blocks.ops.backends import Backend, is_differentiated_forward

MODULE = "flash_attn"
WIDEST_HEAD = 256


def refuses(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> str:
    """Return why flash kernels cannot run these inputs, or ""."""
    if not q_BHLP.is_cuda:
        return "its kernels require a GPU"
    if q_BHLP.dtype not in (torch.float16, torch.bfloat16):
        return "its kernels require float16 or bfloat16"
    if mask is not None and not causal:
        return "it supports no mask (padding or documents)"
    width = q_BHLP.shape[3]
    if width > WIDEST_HEAD or width % 8:
        return f"the head width must be a multiple of 8, at most {WIDEST_HEAD}"
    if is_differentiated_forward():
        return "its kernels have no forward-mode derivatives"
    return ""


def _attend(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> Tensor:
    kernels = require(MODULE, package="flash-attn")
    q, k, v = (t.transpose(1, 2) for t in (q_BHLP, k_BKTP, v_BKTP))
    y: Tensor = kernels.flash_attn_func(q, k, v, causal=causal)  # aligns the last query with the last key
    return y.transpose(1, 2)


def _pays(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> bool:
    """Prefer flash only for a window after earlier tokens, for which torch's kernels read a mask.

    256 tokens after 1792, 8 rows, 12 heads of width 64, on an H200: 0.066 ms, sdpa 0.087; with the backward
    pass 0.238, sdpa 0.268. Without a mask torch uses cuDNN's kernels, which are twice as fast.
    """
    return causal and mask is not None and not after.suits(q_BHLP, k_BKTP)


BACKEND = Backend("flash-attn", _attend, refuses, _pays, MODULE, "flash-attn")
