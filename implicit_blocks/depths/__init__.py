"""Depths: how often the core is looped in training. Their specs and their registration are in this file.

Importing this package imports no torch; the modules are imported on first use.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.depths.distributions import (
    LARGEST_MEAN,
    Uniform,
    draw_log_normal,
    draw_poisson,
    mean_of_clamped_poisson,
    mean_of_log_normal_poisson,
)
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import DepthSpec

if TYPE_CHECKING:
    from implicit_blocks.depths.depth import Depth as Depth
    from implicit_blocks.depths.depth import FixedDepth as FixedDepth
    from implicit_blocks.depths.depth import RandomDepth as RandomDepth
    from implicit_blocks.depths.depth import UntilConverged as UntilConverged


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in depths."""
    add("depth", UntilConvergedSpec, "implicit_blocks.depths.depth:UntilConverged")
    add("depth", FixedDepthSpec, "implicit_blocks.depths.depth:FixedDepth")
    add("depth", PoissonDepthSpec, "implicit_blocks.depths.depth:RandomDepth")
    add("depth", LogNormalPoissonDepthSpec, "implicit_blocks.depths.depth:RandomDepth")
    add("depth", UniformDepthSpec, "implicit_blocks.depths.depth:RandomDepth")


def _at_least_one(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError("without loops the core is skipped; choose at least 1 loop")
    return value


def _positive_mean(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
        raise ValueError("the mean number of loops must be positive; choose for example 4")
    return value


Loops = Annotated[int, Field(ge=1), BeforeValidator(_at_least_one)]
"""A number of loops, at least 1."""

MeanLoops = Annotated[float, Field(gt=0, le=LARGEST_MEAN), BeforeValidator(_positive_mean)]
"""The mean of a distribution of loops, positive."""


class UntilConvergedSpec(DepthSpec):
    """The stopping rule ends the loop: a search for the fixed point."""

    kind: Literal["until_converged"] = "until_converged"


class FixedDepthSpec(DepthSpec):
    """The same number of loops in every step."""

    kind: Literal["fixed"] = "fixed"
    loops: Loops
    """Number of loops."""

    def expected_loops(self) -> float:
        """Return `loops`."""
        return float(self.loops)

    def maximum_loops(self) -> int:
        """Return `loops`."""
        return self.loops


class RandomDepthSpec(DepthSpec):
    """Base of the random depths; the number of loops is a function of seed and step, equal on all ranks."""

    per: Literal["batch", "sequence"] = "batch"
    """`batch`: one number for all sequences. `sequence`: one number for each."""
    seed: NonNegativeInt = 0
    """Seed of the numbers."""

    def draw(self, uniform: Uniform) -> int:
        """Return a number of loops, computed from uniform numbers.

        Raises:
            NotImplementedError: the kind does not override the method.

        """
        raise NotImplementedError(f"{type(self).__name__} must override draw(uniform)")


class PoissonDepthSpec(RandomDepthSpec):
    """``min(max(N, minimum), maximum)`` with N Poisson-distributed: Parcae's sampler, without a maximum."""

    kind: Literal["poisson"] = "poisson"
    mean: MeanLoops
    """Mean of N."""
    minimum: Loops = 1
    """Lower bound of the number of loops."""
    maximum: Loops | None = None
    """Upper bound of the number of loops; null: unbounded."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.maximum is not None and self.maximum < self.minimum:
            message = (
                f"maximum {self.maximum} is below minimum {self.minimum}; choose at least {self.minimum}"
            )
            raise field_error(message, "maximum", value=self.maximum)
        return self

    def draw(self, uniform: Uniform) -> int:
        """Return a number of loops."""
        count = max(draw_poisson(self.mean, uniform), self.minimum)
        return count if self.maximum is None else min(count, self.maximum)

    def expected_loops(self) -> float:
        """Return the mean number of loops; the bounds shift it away from `mean`."""
        return mean_of_clamped_poisson(self.mean, self.minimum, self.maximum)

    def maximum_loops(self) -> int | None:
        """Return `maximum`."""
        return self.maximum


class LogNormalPoissonDepthSpec(RandomDepthSpec):
    """``min(N + 1, maximum)``, N Poisson-distributed with a log-normal rate: Huginn's sampler.

    The rate is ``exp(log mean − σ²/2 + σ x)`` with x standard normal; its mean is `mean`, so that the mean
    number of loops without a maximum is ``mean + 1``.
    """

    kind: Literal["log_normal_poisson"] = "log_normal_poisson"
    mean: MeanLoops
    """Mean of the rate."""
    sigma: Annotated[float, Field(ge=0, le=2)] = 0.5
    """Standard deviation of the rate's logarithm."""
    maximum: Loops | None = None
    """Upper bound of the number of loops; null: unbounded."""

    def draw(self, uniform: Uniform) -> int:
        """Return a number of loops."""
        rate = draw_log_normal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, uniform)
        count = draw_poisson(rate, uniform) + 1
        return count if self.maximum is None else min(count, self.maximum)

    def expected_loops(self) -> float:
        """Return the mean number of loops."""
        return mean_of_log_normal_poisson(self.mean, self.sigma, self.maximum)

    def maximum_loops(self) -> int | None:
        """Return `maximum`."""
        return self.maximum


class UniformDepthSpec(RandomDepthSpec):
    """Every number of loops from `low` to `high` with equal probability."""

    kind: Literal["uniform"] = "uniform"
    low: Loops = 1
    """Smallest number of loops."""
    high: Loops
    """Largest number of loops, included."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.low > self.high:
            message = f"low {self.low} exceeds high {self.high}; choose at most {self.high}"
            raise field_error(message, "low", value=self.low)
        return self

    def draw(self, uniform: Uniform) -> int:
        """Return a number of loops."""
        return self.low + math.floor(uniform() * (self.high - self.low + 1))

    def expected_loops(self) -> float:
        """Return the mean of both bounds."""
        return (self.low + self.high) / 2

    def maximum_loops(self) -> int:
        """Return `high`."""
        return self.high


if not TYPE_CHECKING:
    __getattr__ = names_of_components(
        __name__, register_components, Depth="implicit_blocks.depths.depth", RandomDepthSpec=__name__
    )
