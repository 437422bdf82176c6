"""Prefix products of many sequences: a two-level scan by table look-ups.

A sequence of L tokens is cut into about √L chunks of about √L tokens. The chunks of all sequences are scanned
in parallel, then the chunk totals, and each chunk's products are composed with the total before it: two
look-ups per token in about 2√L vectorized calls. A plain loop over tokens needs one look-up per token in 2·L
calls, which for a hundred sequences is dominated by call overhead; a Hillis-Steele scan needs log2(L)
look-ups per token. Products are exact, so the order of composition does not change the result.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trainer.specs.groups import Algebra

Indices = npt.NDArray[np.int64]


class PrefixProducts:
    """``t_1 = x_1``, ``t_j = t_{j-1} ∘ x_j`` for sequences over a finite group or monoid."""

    def __init__(self, algebra: Algebra) -> None:
        self._order = algebra.order
        self._identity = algebra.identity
        # Flat, at [x·order + t]: the token's row holds t∘x for every t.
        self._table: Indices = np.ascontiguousarray(algebra.table.T, dtype=np.int64).reshape(-1)

    def __call__(self, tokens_LB: npt.NDArray[np.integer]) -> Indices:
        """Prefix products along the first axis.

        Args:
            tokens_LB: element indices, (L, B), any integer type, time first so that the B are contiguous.

        Returns:
            int64, (L, B).

        """
        length, batch = tokens_LB.shape
        size = math.isqrt(length - 1) + 1
        chunks = -(-length // size)
        # Rows of the table: premultiplied once, so that a step is one addition and one look-up.
        rows_KSB = np.full((chunks * size, batch), self._identity * self._order, dtype=np.int64)
        np.multiply(tokens_LB, self._order, out=rows_KSB[:length], dtype=np.int64)
        rows_KSB = rows_KSB.reshape(chunks, size, batch)

        within_KSB = np.empty_like(rows_KSB)
        within_KSB[:, 0] = rows_KSB[:, 0] // self._order
        state_KB = within_KSB[:, 0]
        for step in range(1, size):
            state_KB = self._look_up(rows_KSB[:, step] + state_KB)
            within_KSB[:, step] = state_KB

        if chunks > 1:
            totals_KB = state_KB * self._order
            carry_KB = np.empty((chunks - 1, batch), dtype=np.int64)
            carry_KB[0] = state_KB[0]
            for chunk in range(1, chunks - 1):
                carry_KB[chunk] = self._look_up(totals_KB[chunk] + carry_KB[chunk - 1])
            later_KSB = within_KSB[1:]
            np.multiply(later_KSB, self._order, out=rows_KSB[1:])
            rows_KSB[1:] += carry_KB[:, None]
            # "clip" only spares the bounds check's extra buffer; no index is out of bounds.
            np.take(self._table, rows_KSB[1:], out=later_KSB, mode="clip")
        return within_KSB.reshape(chunks * size, batch)[:length]

    def _look_up(self, indices: Indices) -> Indices:
        return np.take(self._table, indices, mode="clip")
