"""Criteria that read neither the points nor the predictions: the residual, and the number of calls.

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from implicit_blocks.exits.exit import Exit
from implicit_blocks.specs.base import require_count


class ResidualExit(Exit):
    """The residual ``‖f(z) − z‖``, relative or absolute as the stopping rule says: the default.

    A search applies its stopping rule as without a criterion, at no cost.
    """

    per_token: ClassVar[bool] = False
    measures: ClassVar[bool] = False

    def init(self, z_EF: Tensor) -> tuple[()]:
        """Return an empty state."""
        return ()

    def measure(
        self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: tuple[()]
    ) -> tuple[Tensor, tuple[()]]:
        """Return the residual."""
        return residual_E1, state


class FixedExit(Exit):
    """Exactly ``loops`` calls of the map, as looped models with a fixed depth are evaluated.

    The measure is the number of calls that remain, so that the value of the last call is returned. With a
    solver that damps or extrapolates, the calls are those of its iterates.

    Args:
        loops: number of calls, at least 1.

    Raises:
        ValueError: fewer than one call.

    """

    per_token: ClassVar[bool] = False
    threshold = 0.0

    def __init__(self, *, loops: int) -> None:
        require_count("loops", loops)
        self.loops = self.exact_calls = loops

    def init(self, z_EF: Tensor) -> Tensor:
        """Return the number of calls that remain, (E,)."""
        remaining: Tensor = z_EF.new_full(z_EF.shape[:1], self.loops, dtype=torch.float32)
        return remaining

    def measure(
        self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the number of calls that remain."""
        remaining = (state - 1).clamp(min=0)
        return remaining[:, None], remaining
