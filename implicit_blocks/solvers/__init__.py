"""Solvers: update rules for ``z = f(z)``, one per file. Their specs and their registration are in this file.

Importing this package imports no torch; the classes of the rules are imported on first use. To add a solver,
write its rule in a file of its own, and add to this file its spec, its line in `register_components` and its
import for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import Damping, SolverSpec

if TYPE_CHECKING:
    from implicit_blocks.solvers.anderson import Anderson as Anderson
    from implicit_blocks.solvers.attractor_anderson import AttractorAnderson as AttractorAnderson
    from implicit_blocks.solvers.broyden import Broyden as Broyden
    from implicit_blocks.solvers.patient_picard import PatientPicard as PatientPicard
    from implicit_blocks.solvers.picard import Picard as Picard


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in solvers."""
    add("solver", PicardSpec, "implicit_blocks.solvers.picard:Picard.from_spec")
    add("solver", PatientPicardSpec, "implicit_blocks.solvers.patient_picard:PatientPicard.from_spec")
    add("solver", AndersonSpec, "implicit_blocks.solvers.anderson:Anderson.from_spec")
    add("solver", BroydenSpec, "implicit_blocks.solvers.broyden:Broyden.from_spec")
    add(
        "solver",
        AttractorAndersonSpec,
        "implicit_blocks.solvers.attractor_anderson:AttractorAnderson.from_spec",
    )


class PicardSpec(SolverSpec):
    """Picard iteration: ``z ← (1 - damping) z + damping f(z)``."""

    differentiable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    kind: Literal["picard"] = "picard"
    damping: Damping = 1.0
    """Weight of f(z) in the step; below 1 it slows down a contraction and stabilizes an oscillation."""
    undamped_first: bool = False
    """Take the first step undamped, as the published unrolled training does."""


class PatientPicardSpec(SolverSpec):
    """Picard iteration whose damping decreases when the residual stops decreasing."""

    kind: Literal["patient_picard"] = "patient_picard"
    damping: Damping = 1.0
    """Weight of f(z) in the first steps."""
    patience: PositiveInt = 8
    """Iterations without a new lowest residual before the damping is reduced."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor that the damping is multiplied by."""
    min_damping: Damping = 0.25
    """Lower bound of the damping."""

    @model_validator(mode="after")
    def _decreases(self) -> Self:
        if self.min_damping > self.damping:
            message = f"min_damping must not exceed damping, which is {self.damping}"
            raise field_error(message, "min_damping", value=self.min_damping)
        return self


class AndersonSpec(SolverSpec):
    """Anderson acceleration: combine past values of f so that the combined residual is smallest."""

    differentiable: ClassVar[bool] = True

    kind: Literal["anderson"] = "anderson"
    memory: PositiveInt = 5
    """Number of past iterates that are combined; each costs two copies of the state."""
    damping: Damping = 1.0
    """Weight of the combined f(z) in the step."""
    regularization: NonNegativeFloat = 1e-6
    """Added to the Gram matrix's diagonal, relative to its size."""


class BroydenSpec(SolverSpec):
    """Broyden's method: Newton steps with an inverse Jacobian estimated from the past steps."""

    differentiable: ClassVar[bool] = True

    kind: Literal["broyden"] = "broyden"
    memory: PositiveInt = 10
    """Maximum number of rank-one terms of the inverse Jacobian; each costs two copies of the state."""


class AttractorAndersonSpec(SolverSpec):
    """Anderson mixing with the stopping rule published with Attractor models (2026), to reproduce them.

    Not causal: a token depends on later tokens, and on the other rows of the batch. Choose `anderson` for new
    models.
    """

    couples_tokens: ClassVar[bool] = True

    kind: Literal["attractor_anderson"] = "attractor_anderson"
    memory: PositiveInt = 5
    """Number of past iterates that are combined; each costs two copies of the state. 1: plain iteration."""
    beta: Damping = 1.0
    """Weight of the combined f(z) in the step."""
    lam: PositiveFloat = 1e-4
    """Added to the Gram matrix's diagonal; absolute."""
    min_iterations: NonNegativeInt = 6
    """Calls of the map before the search may stop."""

    def state_bytes(self, features: int, *, itemsize: int) -> int:
        """Return ``2 · memory`` copies of the element and a counter."""
        return 2 * self.memory * features * itemsize + 8


if not TYPE_CHECKING:
    __getattr__ = names_of_components(__name__, register_components)
