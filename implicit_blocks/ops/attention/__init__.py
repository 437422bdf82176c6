"""Attention over given queries, keys and values, with a choice of backends behind one function.

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
        k_BKTP: keys; each head's serve H / K query heads.
        v_BKTP: values.
        mask: (…, L, T) bool, which keys a query sees; None: all, or by ``causal``.
        causal: the queries are the last L of the T tokens, and each sees itself and what comes before. With
            L < T a mask must say the same, for backends that go by it.
        blocks: what `find_blocks` found of the mask, for flex attention, which finds it anew each time
            otherwise.
        backend: ``auto``, or a name of ``ATTENTION.names``: that one or an error. ``torch`` is the formula
            written out, in memory for all L × T scores: what the others are tested against.

    Raises:
        ValueError: for an unknown backend or one that can't run these inputs.
        ImportError: for a backend asked for by name whose package is missing.

    """
    taken = ATTENTION.choose(backend, q_BHLP, k_BKTP, v_BKTP, mask, causal, blocks)
    y: Tensor = taken.run(q_BHLP, k_BKTP, v_BKTP, mask, causal, blocks)
    return y
