"""Procedures captured as CUDA graphs, and host values written without synchronization."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.cuda.capture import capture

_LOG = logging.getLogger(__name__)


class CapturedGraphs:
    """Procedures by name, which work on tensors at fixed addresses and never read a value from the device.

    The first call of a procedure runs eagerly, so that its kernels are compiled and tuned; the second is
    captured, and later ones are one launch. A procedure that cannot be captured runs eagerly, with a line in
    the log. Procedures keep nothing in the memory of their graphs between calls, so all graphs share a pool.
    A procedure is passed with each call; no reference to it is kept.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[str, int], torch.cuda.CUDAGraph | None] = {}
        """The graph of each procedure that was called twice; None where it cannot be captured."""
        self._called: set[tuple[str, int]] = set()
        self._pool: Any = torch.cuda.graph_pool_handle()

    def replay(self, name: str, slots: int) -> bool:
        """Replay the graph of this procedure, and return whether there is one."""
        graph = self.graphs.get((name, slots))
        if graph is None:
            return False
        graph.replay()
        return True

    def do(self, name: str, slots: int, procedure: Callable[[], None]) -> None:
        """Run the procedure of this name for this number of slots."""
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
            _LOG.warning("%s cannot be captured as a CUDA graph, so it runs eagerly: %s", name, error)
            self._pool = (
                torch.cuda.graph_pool_handle()
            )  # a pool in which a capture failed cannot be used again
            return None
        return graph


def put_(whole: Tensor, values: Sequence[Any]) -> None:
    """Write host values into a tensor without synchronizing with the device."""
    here = torch.tensor(values, dtype=whole.dtype)
    whole.copy_(here.pin_memory() if whole.is_cuda else here, non_blocking=True)
