"""Attention by torch's flex attention, which skips fully masked blocks.

J. Dong et al., "Flex Attention", 2024. Use it for packed documents and bands, where most blocks are empty.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from implicit_blocks.ops.backends import Backend, is_differentiated_forward

Blocks = Any  # torch.nn.attention.flex_attention.BlockMask, whose module takes a second to import


def find_blocks(mask: Tensor | None, *, length: int, keys: int, causal: bool, device: torch.device) -> Blocks:
    """Return which blocks of keys each block of queries attends to; compute it once per window.

    Args:
        mask: (L, T) or (B, 1, L, T) bool, as for ``attend``; None: according to ``causal``.
        length: number of queries, L.
        keys: number of keys, T.
        causal: as for ``attend``; ignored if there is a mask.
        device: of the queries.

    """
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if mask is None:
            return key <= query + (keys - length) if causal else key >= 0
        return mask[query, key] if mask.ndim == 2 else mask[b, 0, query, key]

    batch = mask.shape[0] if mask is not None and mask.ndim == 4 else None
    return create_block_mask(seen, batch, None, length, keys, device=str(device))


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel per shape, with and without gradients: shape-generic kernels are slower, and beyond torch's
    # recompilation limit all scores would be computed, with only a warning.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def _refuses(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> str:
    if q_BHLP.is_cuda and (q_BHLP.dtype == torch.float64 or q_BHLP.shape[3] < 16):
        return "its kernels require a head width of at least 16 and do not support float64"
    given = (q_BHLP, k_BKTP, v_BKTP)
    if q_BHLP.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "it has no backward pass on a CPU"
    if is_differentiated_forward():
        return "its kernels have no forward-mode derivatives"
    return ""


def _pays(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> bool:
    return blocks is not None


def _attend(
    q_BHLP: Tensor, k_BKTP: Tensor, v_BKTP: Tensor, mask: Tensor | None, causal: bool, blocks: Blocks | None
) -> Tensor:
    """Attend with a kernel compiled for the inputs; on a CPU with torch's plain operators."""
    from torch.nn.attention.flex_attention import flex_attention

    if blocks is None:
        length, keys = q_BHLP.shape[2], k_BKTP.shape[2]
        blocks = find_blocks(mask, length=length, keys=keys, causal=causal, device=q_BHLP.device)
    grouped = q_BHLP.shape[1] != k_BKTP.shape[1]
    if q_BHLP.is_cuda:
        attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
        options = {"BACKEND": "TRITON"} if _is_too_wide_to_decode(q_BHLP, k_BKTP) else None
        y: Tensor = attend(
            q_BHLP, k_BKTP, v_BKTP, block_mask=blocks, enable_gqa=grouped, kernel_options=options
        )
        return y
    # On a CPU it checks only the inputs for a backward pass, and warns that it is not compiled.
    q, k, v = (t if torch.is_grad_enabled() else t.detach() for t in (q_BHLP, k_BKTP, v_BKTP))
    with catch_warnings():
        simplefilter("ignore")
        y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=grouped)
    return y


def _is_too_wide_to_decode(q_BHLP: Tensor, k_BKTP: Tensor) -> bool:
    """Return whether the decode kernel, used for fewer than 128 queries, exceeds shared memory.

    It processes all query heads that share a key head together: 72 queries of four heads form a block of 512
    rows, which is too large for a multiprocessor's memory.
    """
    return q_BHLP.shape[2] * (q_BHLP.shape[1] // k_BKTP.shape[1]) > 128


BACKEND = Backend("flex", _attend, _refuses, _pays)
