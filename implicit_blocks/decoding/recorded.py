"""What keeps the host out of the device's way: procedures recorded as CUDA graphs, values that come later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.graphs import recording

_LOG = logging.getLogger(__name__)


class Recorded:
    """A procedure without arguments that works on tensors which stay where they are, and asks for no value.

    Its first call runs as it is, so that compilers and tuners of kernels have had their turn; the second one
    is recorded, and later ones are one launch. What can't be recorded goes on as it is, with a line in the
    log.

    Args:
        procedure: what is done.
        name: of it, for the log.
        pool: of the graphs' memory; procedures may share one that leave nothing in it between their calls.

    """

    def __init__(self, procedure: Callable[[], None], *, name: str, pool: Any) -> None:
        self.procedure, self.name, self.pool = procedure, name, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        """Do it."""
        self._calls += 1
        if self._calls == 2:
            self._record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.procedure()

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self.pool):
                self.procedure()
        except RuntimeError as error:
            _LOG.warning("%s can't be recorded as a CUDA graph, so it is launched: %s", self.name, error)
            return
        self.graph = graph


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
