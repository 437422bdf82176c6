"""The specs of the solver and the gradient, and their costs. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from implicit_blocks.specs import GradientSpec, SolverSpec, field_error

Damping = Annotated[float, Field(gt=0, lt=1)]
"""β in ``p_{m+1} = (1 - β) p_{m-1} + β f(p_m)``; with 1 a step could not be undone."""

ROUNDING = 2.0**-53
"""Relative rounding error of float64."""


def most_steps(damping: float, max_error: float) -> int:
    """Return the number of steps that can be undone before rounding may exceed ``max_error``.

    Undoing a step divides by ``1 - damping``: for a map that expands nothing, rounding errors grow by at most
    this factor per step.
    """
    return max(0, math.floor(math.log(max_error / ROUNDING) / -math.log1p(-damping)))


class ReversibleSolverSpec(SolverSpec):
    """``p_{m+1} = (1 - damping) p_{m-1} + damping f(p_m)``, in float64: steps that can be undone."""

    differentiable: ClassVar[bool] = True

    kind: Literal["reversible"] = "reversible"
    damping: Damping = 0.5
    """Share of f in a step."""


class ReversibleGradientSpec(GradientSpec):
    """Differentiate `steps` reversible steps, which backward undoes instead of storing them.

    S. McCallum, K. Arora & J. Foster, "Reversible Deep Equilibrium Models", 2025.
    """

    kind: Literal["reversible"] = "reversible"
    steps: PositiveInt = 8
    """Number of differentiated steps."""
    damping: Damping = 0.5
    """Share of f in a step."""
    search: bool = True
    """Search first, without gradients, and start the steps there; false: at the start, as published."""
    max_error: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Maximum relative error of undoing the steps; backward raises an error above it."""

    def forward_equivalents(self, iterations: float) -> float:
        """Return ``4 · steps`` (two calls and one backward pass per step) plus the calls of the search."""
        return 4 * self.steps + (iterations if self.search else 0)

    @model_validator(mode="after")
    def _can_be_undone(self) -> Self:
        most = most_steps(self.damping, self.max_error)
        if self.steps > most:
            message = (
                f"undoing {self.steps} steps with damping {self.damping} may exceed max_error "
                f"{self.max_error}; take at most {most}, or a smaller damping"
            )
            raise field_error(message, "steps", value=self.steps)
        return self
