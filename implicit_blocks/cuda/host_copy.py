"""Small tensors of a device read by the host while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostReader:
    """Reads tensors one after the other, by a copy and an event.

    ``tolist`` would wait for whatever else the device is given, and ``set_sync_debug_mode`` would say so.
    """

    def __init__(self) -> None:
        self._here: Tensor | None = None
        self._arrives: torch.cuda.Event | None = None

    def send(self, values: Tensor) -> None:
        """Launch the copy of what will be read next, ahead of what is launched afterwards."""
        if not values.is_cuda:
            return
        if self._here is None or self._here.shape != values.shape or self._here.dtype != values.dtype:
            self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._here.copy_(values, non_blocking=True)
        self._arrives = torch.cuda.Event()
        self._arrives.record()

    def read(self, values: Tensor) -> Any:
        """Return what a tensor holds, as ``tolist`` does; it may have been sent before."""
        if not values.is_cuda:
            return values.tolist()
        if self._arrives is None:
            self.send(values)
        assert self._arrives is not None
        assert self._here is not None
        self._arrives.synchronize()
        self._arrives = None
        return self._here.tolist()
