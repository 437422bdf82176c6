"""Memory for results that is reused once no reference to the previous result remains."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Tensors of one shape, acquired one at a time; a buffer is free once all references to it are gone.

    A captured graph, which writes to fixed addresses, can thus return its result without a copy. A view of
    an acquired tensor, or an autograd graph that saved it, is a reference as well. As for any reused memory,
    work on other streams must finish before the last reference is dropped.

    Args:
        like: a tensor of the shape, dtype and device of the buffers.
        count: the number of buffers.

    """

    def __init__(self, like: Tensor, count: int) -> None:
        with torch.inference_mode(False):
            self._buffers = [torch.empty_like(like, requires_grad=False) for _ in range(count)]
        self._alone = [_references(buffer) for buffer in self._buffers]

    def free(self) -> int | None:
        """Return the index of a free buffer, or None."""
        for number, (buffer, alone) in enumerate(zip(self._buffers, self._alone, strict=True)):
            if _references(buffer) <= alone:
                return number
        return None

    def acquire(self, number: int) -> Tensor:
        """Return a tensor that shares the memory of a buffer, which is in use until the tensor is gone."""
        return self._buffers[number].detach()

    def index_of(self, z: Tensor) -> int | None:
        """Return the index of the buffer whose memory and layout ``z`` has, or None."""
        place, first = z.data_ptr(), self._buffers[0]
        if z.stride() != first.stride() or z.shape != first.shape or z.dtype != first.dtype:
            return None
        return next((n for n, buffer in enumerate(self._buffers) if buffer.data_ptr() == place), None)


def _references(buffer: Tensor) -> int:
    """Return one more than the number of tensors that share the memory."""
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
