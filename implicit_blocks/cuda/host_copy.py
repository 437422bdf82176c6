"""Asynchronous copies of small tensors from a device to the host."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class AsyncHostCopy:
    """Copies one tensor at a time to the host, by an asynchronous copy and an event.

    ``tolist`` would wait for all other work of the device, and ``set_sync_debug_mode`` would report it.

    Args:
        values: copied immediately; ``read()`` returns their present values.

    """

    _free: ClassVar[dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, torch.cuda.Event]]]] = {}
    """Locked memory and events of copies that have been read, by shape and dtype."""

    def __init__(self, values: Tensor | None = None) -> None:
        self._here: Tensor | None = None
        self._arrives: torch.cuda.Event | None = None
        self._event: torch.cuda.Event | None = None
        self._read: Any = None
        """The values of a copy whose memory another one may use now."""
        self._once = values is not None
        if values is not None:
            if values.is_cuda:
                free = self._free.get((values.shape, values.dtype))
                if free:
                    self._here, self._event = free.pop()
                self.send(values)
            else:
                self._here = values.clone()

    def send(self, values: Tensor) -> None:
        """Start the copy that the next ``read`` returns, ahead of later launches; no-op for a CPU tensor."""
        if not values.is_cuda:
            return
        if self._here is None or self._here.shape != values.shape or self._here.dtype != values.dtype:
            self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._here.copy_(values, non_blocking=True)
        self._event = self._event or torch.cuda.Event()
        self._arrives = self._event
        self._arrives.record(_current_stream(values.device))

    @property
    def arrived(self) -> bool:
        """Whether ``read()`` returns the values without waiting."""
        return self._arrives is None or self._arrives.query()

    def read(self, values: Tensor | None = None) -> Any:
        """Return the values of a tensor as ``tolist`` does; without a tensor, those of the last copy."""
        if values is not None and not values.is_cuda:
            return values.tolist()
        if values is not None and self._arrives is None:
            self.send(values)
        if self._here is None:
            return self._read
        if self._arrives is not None:
            self._arrives.synchronize()
            self._arrives = None
        found = self._here.tolist()
        if self._once and self._event is not None:
            key = self._here.shape, self._here.dtype
            self._free.setdefault(key, []).append((self._here, self._event))
            self._here, self._read = None, found
        return found


_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}
"""Streams by device and address."""


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device.

    ``torch.cuda.current_stream`` takes the host longer than an asynchronous copy.
    """
    assert device.index is not None  # that of a tensor
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _STREAMS:
        _STREAMS[key] = torch.cuda.current_stream(device)
    return _STREAMS[key]
