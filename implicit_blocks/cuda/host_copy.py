"""Small tensors of a device read by the host while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AsyncHostCopy:
    """Copies tensors to the host, one after the other, while the device goes on: by a copy and an event.

    ``tolist`` would wait for whatever else the device is given, and ``set_sync_debug_mode`` would say so.

    Args:
        values: copied at once, to be returned as they are now by ``read()``.

    """

    def __init__(self, values: Tensor | None = None) -> None:
        self._here: Tensor | None = None
        self._arrives: torch.cuda.Event | None = None
        if values is not None:
            if values.is_cuda:
                self.send(values)
            else:
                self._here = values.clone()

    def send(self, values: Tensor) -> None:
        """Start the copy of what is read next, ahead of what is launched afterwards; nothing on the CPU."""
        if not values.is_cuda:
            return
        if self._here is None or self._here.shape != values.shape or self._here.dtype != values.dtype:
            self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._here.copy_(values, non_blocking=True)
        self._arrives = torch.cuda.Event()
        self._arrives.record()

    def read(self, values: Tensor | None = None) -> Any:
        """Return what a tensor holds, as ``tolist`` does; without one, what was copied last."""
        if values is not None and not values.is_cuda:
            return values.tolist()
        if values is not None and self._arrives is None:
            self.send(values)
        assert self._here is not None
        if self._arrives is not None:
            self._arrives.synchronize()
            self._arrives = None
        return self._here.tolist()
