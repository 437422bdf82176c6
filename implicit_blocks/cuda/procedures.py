"""What keeps the host out of the device's way: procedures recorded as CUDA graphs, values that come later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.cuda.capture import recording

_LOG = logging.getLogger(__name__)


class Recordings:
    """Procedures by name, which work on tensors that stay where they are, and ask for no value.

    The first call of each runs as it is, so that compilers and tuners of kernels have had their turn; the
    second one is recorded, and later ones are one launch. What can't be recorded goes on as it is, with a
    line in the log. Procedures leave nothing in the memory of their graphs between calls, which they share.
    They are given with each call, and not held.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[str, int], torch.cuda.CUDAGraph | None] = {}
        """Of each that was called twice; None where it can't be recorded."""
        self._called: set[tuple[str, int]] = set()
        self._pool: Any = torch.cuda.graph_pool_handle()

    def do(self, name: str, lanes: int, procedure: Callable[[], None]) -> None:
        """Do what goes by this name for so many lanes."""
        key = (name, lanes)
        if key not in self.graphs:
            if key not in self._called:
                self._called.add(key)
                procedure()
                return
            self.graphs[key] = self._recorded(f"{name} of {lanes} lanes", procedure)
        graph = self.graphs[key]
        if graph is not None:
            graph.replay()
        else:
            procedure()

    def _recorded(self, name: str, procedure: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._pool):
                procedure()
        except RuntimeError as error:
            _LOG.warning("%s can't be recorded as a CUDA graph, so it is launched: %s", name, error)
            self._pool = torch.cuda.graph_pool_handle()  # a pool that a recording failed in may take no other
            return None
        return graph


class Late:
    """Values of a tensor as they are now, on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._here = values.clone()
            return
        self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._here.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def read(self) -> list[Any]:
        """Return them, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[Any] = self._here.tolist()
        return found


def put_(whole: Tensor, values: Sequence[Any]) -> None:
    """Write values of the host's into a tensor, without waiting for the device."""
    here = torch.tensor(values, dtype=whole.dtype)
    whole.copy_(here.pin_memory() if whole.is_cuda else here, non_blocking=True)
