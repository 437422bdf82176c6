"""Memory for results that is used again as soon as nobody holds the last result in it."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """A few tensors of one shape, lent out by turns; dropping every reference to a loan gives it back.

    What is written to by something that knows fixed addresses, as a captured graph does, can so be handed on
    without a copy. A view of a loan, or a graph of autograd that saved it, holds it like the loan itself. As
    for any memory that is used again, work on another stream must be done before the last reference goes.

    Args:
        like: its shape, type and device.
        count: how many.

    """

    def __init__(self, like: Tensor, count: int) -> None:
        with torch.inference_mode(False):
            self._buffers = [torch.empty_like(like, requires_grad=False) for _ in range(count)]
        self._alone = [_references(buffer) for buffer in self._buffers]

    def free(self) -> int | None:
        """Return the number of one that nobody holds; None: all are lent."""
        for number, (buffer, alone) in enumerate(zip(self._buffers, self._alone, strict=True)):
            if _references(buffer) <= alone:
                return number
        return None

    def acquire(self, number: int) -> Tensor:
        """Lend one out: a tensor that shares its memory."""
        return self._buffers[number].detach()

    def index_of(self, z: Tensor) -> int | None:
        """Return the number of the one that ``z`` lies in, all of it, laid out alike; None: in none."""
        place, first = z.data_ptr(), self._buffers[0]
        if z.stride() != first.stride() or z.shape != first.shape or z.dtype != first.dtype:
            return None
        return next((n for n, buffer in enumerate(self._buffers) if buffer.data_ptr() == place), None)


def _references(buffer: Tensor) -> int:
    """Return how many tensors share the memory, one more than there are."""
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
