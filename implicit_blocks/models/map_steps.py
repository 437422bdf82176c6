"""Consecutive calls of a map, and what can capture them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from implicit_blocks.models.stack import BoundMap


class Steps(NamedTuple):
    """Consecutive calls of a map: ``calls`` times ``z ← (1 − λ) z + λ f(z)``, where λ is the damping."""

    calls: int = 1
    damping: float = 1.0


ONE_CALL = Steps()


class MapCapture(Protocol):
    """Captured CUDA graphs of a map; ``implicit_blocks.models.map_graphs.MapGraphs`` is one."""

    compact: bool
    """Whether rows that are done leave searches."""

    def call(self, f: BoundMap, z_BLD: Tensor, steps: Steps = ...) -> Tensor:
        """Return the point after ``steps``, (B, L, D)."""
