"""How perplexity changes with size: a line for each side of a comparison, and for their difference.

Sizes are compared with text and FLOPs in proportion, so that a line in the logarithm of the parameters is the
simplest description. It is fitted to single runs by least squares; intervals are those of the fitted mean,
with Student's t. They say nothing about sizes at which the line may not hold.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.experiments.equal_compute.compare import quantile95


@dataclass(frozen=True, kw_only=True)
class Line:
    """``y = intercept + slope · x`` by least squares."""

    intercept: float
    slope: float
    mean_x: float
    squares_x: float
    """Sum of the squared distances of the values of x from their mean."""
    variance: float
    """Of the values of y around the line; NaN for two values."""
    count: int
    """Number of values."""

    @classmethod
    def fitted(cls, xs: Sequence[float], ys: Sequence[float]) -> Line:
        """Return the line of these values.

        Raises:
            ValueError: fewer than two different values of x.

        """
        if len(set(xs)) < 2:
            raise ValueError(f"a line needs at least two sizes, got {sorted(set(xs))}")
        slope, intercept = statistics.linear_regression(xs, ys)
        left = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
        mean = statistics.fmean(xs)
        return cls(
            intercept=intercept,
            slope=slope,
            mean_x=mean,
            squares_x=sum((x - mean) ** 2 for x in xs),
            variance=left / (len(xs) - 2) if len(xs) > 2 else math.nan,
            count=len(xs),
        )

    def at(self, x: float) -> tuple[float, float, float]:
        """Return the fitted mean at x, and its 95 % interval (NaN for two values)."""
        mean = self.intercept + self.slope * x
        error = math.sqrt(self.variance * (1 / self.count + (x - self.mean_x) ** 2 / self.squares_x))
        half = math.nan if self.count < 3 else quantile95(self.count - 2) * error
        return mean, mean - half, mean + half

    @property
    def slope_interval(self) -> tuple[float, float]:
        """The 95 % interval of the slope (NaN for two values)."""
        if self.count < 3:
            return math.nan, math.nan
        half = quantile95(self.count - 2) * math.sqrt(self.variance / self.squares_x)
        return self.slope - half, self.slope + half


Losses = Mapping[int, Mapping[int, float]]
"""Losses in nats by number of parameters and seed."""


def line_of_losses(losses: Losses) -> Line:
    """Return the line of the loss in the natural logarithm of the number of parameters."""
    points = [(math.log(size), loss) for size, values in losses.items() for loss in values.values()]
    return Line.fitted([x for x, _ in points], [y for _, y in points])


def line_of_differences(ours: Losses, theirs: Losses) -> Line:
    """Return the line of ``ours - theirs``, seed by seed, so that the scatter of both sides is part of it.

    Raises:
        ValueError: fewer than two sizes have a seed on both sides.

    """
    common = {
        size: {seed: loss - theirs[size][seed] for seed, loss in values.items() if seed in theirs[size]}
        for size, values in ours.items()
        if size in theirs
    }
    return line_of_losses({size: values for size, values in common.items() if values})
