"""Row compaction: rows that are done leave the working set of a search."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowCompaction:
    """Decides when rows that are done leave the working set, and which ones stay.

    Args:
        bucket_sizes: keep batches to at most four sizes (the full one, and its halves down to an eighth), for
            compiled kernels and captured graphs. Rows that are done fill the batch up.

    """

    bucket_sizes: bool

    def pays(self, rows: int, *, size: int, full_size: int) -> bool:
        """Whether dropping rows at least halves the working set.

        Args:
            rows: number of rows with active elements.
            size: number of rows in the working set.
            full_size: number of rows in the batch.

        """
        return rows > 0 and 2 * self._fewest(rows, full_size) <= size

    def rows(self, active: Tensor, count: int, *, full_size: int) -> Tensor:
        """Return the indices of the rows that stay, (R,) int64, in order.

        Args:
            active: which elements are active, (B, 1) or (B, T, 1).
            count: number of rows with active elements.
            full_size: number of rows in the batch.

        """
        going = active.flatten(1).any(1)
        if not self.bucket_sizes:
            return going.nonzero().squeeze(1)
        size, fewest = going.numel(), self._fewest(count, full_size)
        while size // 2 >= fewest:
            size //= 2
        return torch.argsort((~going).to(torch.uint8), stable=True)[:size].sort().values

    def _fewest(self, rows: int, full_size: int) -> int:
        return max(rows, full_size // 8) if self.bucket_sizes else rows
