"""How a fixed point is searched for: update rules and the stopping rule."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from implicit_blocks.registry import build
from implicit_blocks.specs.base import ComponentSpec, Spec
from implicit_blocks.specs.errors import field_error

Damping = Annotated[float, Field(gt=0, le=1)]
"""λ in ``z ← (1 - λ) z + λ f(z)``: 1 is the plain step."""

Norm = Literal["relative", "absolute"]
Scope = Literal["sequence", "prefix"]


class SolverSpec(ComponentSpec):
    """Base of all solvers' specs: an update rule for ``z = f(z)``."""

    family: ClassVar[str] = "solver"
    builds: ClassVar[str | None] = "implicit_blocks.interfaces:Solver"
    differentiable: ClassVar[bool] = False
    """Whether autograd may go through the updates: `unrolled` asks for it."""
    couples_tokens: ClassVar[bool] = False
    """Whether a step at one token depends on later tokens of the row: refused with scope `prefix`."""

    def state_bytes(self, features: int, *, itemsize: int) -> int:
        """Bytes that the solver keeps between steps for one element, beside the point itself.

        What its ``init`` returns on the meta device: nothing that large is made, but torch is imported.

        Args:
            features: values of an element: tokens times width, or the width with scope `prefix`.
            itemsize: bytes of a value, 2 (bfloat16), 4 or 8.

        """
        import torch
        from torch.utils import _pytree as pytree

        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
        state = build(self).init(torch.empty(1, features, dtype=dtype, device="meta"))
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(state))


class PicardSpec(SolverSpec):
    """``z ← (1 - damping) z + damping f(z)``."""

    differentiable: ClassVar[bool] = True

    kind: Literal["picard"] = "picard"
    damping: Damping = 1.0
    """Share of f(z) in the step; below 1 slows a contraction down and calms an oscillation."""
    undamped_first: bool = False
    """Take the first step in full, as the published unrolled training does."""


class PatientPicardSpec(SolverSpec):
    """Picard whose damping falls where the residual no longer does: the plain step, then shorter ones."""

    kind: Literal["patient_picard"] = "patient_picard"
    damping: Damping = 1.0
    """Share of f(z) in the first steps."""
    patience: PositiveInt = 8
    """Iterations without a lower residual that are waited for."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What the share is then multiplied by."""
    min_damping: Damping = 0.25
    """Where it ends."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.min_damping > self.damping:
            message = f"the damping begins at {self.damping} and can only fall; choose that or less"
            raise field_error(message, "min_damping", value=self.min_damping)
        return self


class AndersonSpec(SolverSpec):
    """Anderson acceleration: combine the last values of f so that the combined residual is least."""

    differentiable: ClassVar[bool] = True

    kind: Literal["anderson"] = "anderson"
    memory: PositiveInt = 5
    """How many past iterates are combined; each costs two copies of the state."""
    damping: Damping = 1.0
    """Share of the combined f(z) in the step."""
    regularization: NonNegativeFloat = 1e-6
    """Added to the Gram matrix's diagonal, relative to its size."""


class BroydenSpec(SolverSpec):
    """Broyden's method: Newton's step with an inverse Jacobian learned from the steps taken."""

    differentiable: ClassVar[bool] = True

    kind: Literal["broyden"] = "broyden"
    memory: PositiveInt = 10
    """Rank-one terms of the inverse Jacobian that are kept; each costs two copies of the state."""


class Stopping(Spec):
    """When the search ends, for each sequence or token by itself."""

    tolerance: NonNegativeFloat = 0.05
    """Converged once the residual is at or under it; 0 always takes every iteration."""
    max_iterations: PositiveInt = 32
    """Calls of f at most, in the search."""
    norm: Norm = "relative"
    """Residual ``‖f(z) - z‖ / ‖f(z)‖`` (relative) or ``‖f(z) - z‖`` (absolute)."""
    scope: Scope = "sequence"
    """`sequence`: stops as a whole. `prefix`: a token stops once it and all before it have converged."""


class StoppingOverrides(Spec):
    """What differs from the stopping rule of training; null keeps its value."""

    tolerance: NonNegativeFloat | None = None
    """Null: as in training."""
    max_iterations: PositiveInt | None = None
    """Null: 4 times training's."""
    norm: Norm | None = None
    """Null: as in training."""
    scope: Scope | None = None
    """Null: `prefix`, so that no answer depends on later tokens, padding or other sequences."""

    def over(self, training: Stopping) -> Stopping:
        """Give the rule of evaluation, over that of training."""
        return Stopping(
            tolerance=training.tolerance if self.tolerance is None else self.tolerance,
            max_iterations=4 * training.max_iterations
            if self.max_iterations is None
            else self.max_iterations,
            norm=self.norm or training.norm,
            scope=self.scope or "prefix",
        )
