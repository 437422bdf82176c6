"""Moving averages over the iterates of a search, for maps that are noisy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MovingAverage:
    """Averages the points and their values, ``m ← (1 − α) m + α f(z)``, both begun with the first.

    Both are averaged, because the step of the average alone, ``α (f(z) − m)``, is smaller than the residual
    by the factor α and would be taken for convergence.

    Args:
        weight: α in (0, 1].

    """

    weight: float

    def update(self, averages: tuple[Tensor, Tensor] | None, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new averages of points and values; ``averages`` is None before the first call."""
        if averages is None:
            return z, fz
        return torch.lerp(averages[0], z, self.weight), torch.lerp(averages[1], fz, self.weight)
