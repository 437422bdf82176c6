"""What a YAML file says of the solver and the gradient, and what they cost. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from implicit_blocks.specs import GradientSpec, SolverSpec, field_error

Damping = Annotated[float, Field(gt=0, lt=1)]
"""β in ``p_{m+1} = (1 - β) p_{m-1} + β f(p_m)``: at 1 the step could not be undone."""

ROUNDING = 2.0**-53
"""Relative rounding of a float64."""


def most_steps(damping: float, max_error: float) -> int:
    """Count the steps that can be undone before rounding may have grown beyond ``max_error``.

    Undoing a step divides by ``1 - damping``: of a map that expands nothing, rounding grows by at most that a
    step.
    """
    return max(0, math.floor(math.log(max_error / ROUNDING) / -math.log1p(-damping)))


class ReversibleSolverSpec(SolverSpec):
    """``p_{m+1} = (1 - damping) p_{m-1} + damping f(p_m)``, in float64: steps that can be undone."""

    differentiable: ClassVar[bool] = True

    kind: Literal["reversible"] = "reversible"
    damping: Damping = 0.5
    """Share of f in a step."""


class ReversibleGradientSpec(GradientSpec):
    """Differentiate `steps` reversible steps, undone in backward instead of remembered.

    S. McCallum, K. Arora & J. Foster, "Reversible Deep Equilibrium Models", 2025.
    """

    kind: Literal["reversible"] = "reversible"
    steps: PositiveInt = 8
    """Steps taken, all of them differentiated."""
    damping: Damping = 0.5
    """Share of f in a step."""
    search: bool = True
    """Search first, without gradients, and take the steps from there; false: from the start, as published."""
    max_error: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Largest relative error of the undone steps; beyond it the gradient is refused."""

    def forward_equivalents(self, iterations: float) -> float:
        """Count ``4 · steps``, each taken twice and differentiated once, and the search's calls."""
        return 4 * self.steps + (iterations if self.search else 0)

    @model_validator(mode="after")
    def _can_be_undone(self) -> Self:
        most = most_steps(self.damping, self.max_error)
        if self.steps > most:
            message = (
                f"undoing {self.steps} steps of damping {self.damping} may lose more than max_error "
                f"{self.max_error}; take at most {most}, or a smaller damping"
            )
            raise field_error(message, "steps", value=self.steps)
        return self
