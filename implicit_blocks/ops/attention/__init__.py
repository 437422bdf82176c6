"""Attention over given queries, keys and values: one function with several backends.

Shape legend: B batch, H query heads, K key and value heads (dividing H), L queries, T keys, P head width.
"""

from __future__ import annotations

from torch import Tensor

from implicit_blocks.ops.attention import flash, flex, memory_efficient, plain
from implicit_blocks.ops.attention.flex import Blocks, find_blocks
from implicit_blocks.ops.backends import AUTO, Operation

__all__ = ["ATTENTION", "Blocks", "attend", "find_blocks"]


ATTENTION = Operation(
    "attention", flash.BACKEND, flex.BACKEND, plain.SDPA, memory_efficient.BACKEND, plain.WRITTEN_OUT
)


def attend(
    q_BHLP: Tensor,
    k_BKTP: Tensor,
    v_BKTP: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    blocks: Blocks | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Return ``softmax(q k^T / √P) v``, (B, H, L, P).

    Args:
        q_BHLP: queries.
        k_BKTP: keys; each head serves H / K query heads. Keys and values of another type, as in a cache, are
            converted to that of the queries.
        v_BKTP: values.
        mask: (…, L, T) bool, the keys that each query attends to; None: all, or according to ``causal``.
        causal: the queries are the last L of the T tokens, and each attends to itself and earlier tokens. If
            L < T, a mask must express the same, for backends that only use the mask.
        blocks: result of `find_blocks` for the mask, used by flex attention, which otherwise computes it
            in every call.
        backend: ``auto``, or one of ``ATTENTION.names``, which raises an error if it cannot run. ``torch`` is
            the explicit formula, in memory for all L × T scores: the reference for the others.

    Raises:
        ValueError: the backend is unknown or cannot run these inputs.
        ImportError: the package of an explicitly named backend is missing.

    """
    k_BKTP, v_BKTP = k_BKTP.to(q_BHLP.dtype), v_BKTP.to(q_BHLP.dtype)
    taken = ATTENTION.choose(backend, q_BHLP, k_BKTP, v_BKTP, mask, causal, blocks)
    y: Tensor = taken.run(q_BHLP, k_BKTP, v_BKTP, mask, causal, blocks)
    return y
