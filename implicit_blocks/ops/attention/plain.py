"""Attention by torch: the explicit formula, and ``scaled_dot_product_attention``."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention

from implicit_blocks.ops.attention import after
from implicit_blocks.ops.attention.flex import Blocks
from implicit_blocks.ops.backends import Backend, is_forward_mode, is_vmapped


def _sdpa(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> Tensor:
    if isinstance(mask, CausalBias) and after.suits(q_BHLP, k_BKTP):
        return after.attend_after(q_BHLP, k_BKTP, v_BKTP)
    causal, grouped = causal and mask is None, q_BHLP.shape[1] != k_BKTP.shape[1]
    # torch's fused kernels support neither forward mode nor vmap; the math backend supports both.
    with sdpa_kernel(SDPBackend.MATH) if is_forward_mode() or is_vmapped() else nullcontext():
        return scaled_dot_product_attention(
            q_BHLP, k_BKTP, v_BKTP, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )


def _written_out(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> Tensor:
    group = q_BHLP.shape[1] // k_BKTP.shape[1]
    k, v = k_BKTP.repeat_interleave(group, dim=1), v_BKTP.repeat_interleave(group, dim=1)
    scores = q_BHLP @ k.mT / math.sqrt(q_BHLP.shape[-1])
    if causal and mask is None:
        length, keys = scores.shape[-2:]
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = seen.tril(keys - length)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _refuses(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> str:
    if causal and mask is None and q_BHLP.shape[2] != k_BKTP.shape[2]:
        return "it aligns causal queries with the first keys, so fewer queries than keys require a mask"
    return ""


SDPA = Backend("sdpa", _sdpa, _refuses)
WRITTEN_OUT = Backend("torch", _written_out)
