"""What keeps the host out of the device's way: procedures captured as CUDA graphs, values that come later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.cuda.capture import capture

_LOG = logging.getLogger(__name__)


class CapturedGraphs:
    """Procedures by name, which work on tensors that stay where they are, and ask for no value.

    The first call of each runs as it is, so that compilers and tuners of kernels have had their turn; the
    second one is captured, and later ones are one launch. What can't be captured goes on as it is, with a
    line in the log. Procedures leave nothing in the memory of their graphs between calls, which they share.
    They are given with each call, and not held.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[str, int], torch.cuda.CUDAGraph | None] = {}
        """Of each that was called twice; None where it can't be captured."""
        self._called: set[tuple[str, int]] = set()
        self._pool: Any = torch.cuda.graph_pool_handle()

    def do(self, name: str, slots: int, procedure: Callable[[], None]) -> None:
        """Do what goes by this name for so many slots."""
        key = (name, slots)
        if key not in self.graphs:
            if key not in self._called:
                self._called.add(key)
                procedure()
                return
            self.graphs[key] = self._captured(f"{name} of {slots} slots", procedure)
        graph = self.graphs[key]
        if graph is not None:
            graph.replay()
        else:
            procedure()

    def _captured(self, name: str, procedure: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph, self._pool):
                procedure()
        except RuntimeError as error:
            _LOG.warning("%s can't be captured as a CUDA graph, so it runs eagerly: %s", name, error)
            self._pool = torch.cuda.graph_pool_handle()  # a pool that a capture failed in may take no other
            return None
        return graph


def put_(whole: Tensor, values: Sequence[Any]) -> None:
    """Write values of the host's into a tensor, without waiting for the device."""
    here = torch.tensor(values, dtype=whole.dtype)
    whole.copy_(here.pin_memory() if whole.is_cuda else here, non_blocking=True)
