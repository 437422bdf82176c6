"""What of the search is differentiated, and what that costs."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs.base import ComponentSpec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.solvers import Damping, PicardSpec, SolverSpec, Stopping


class GradientSpec(ComponentSpec):
    """Base of all gradient estimators' specs."""

    family: ClassVar[str] = "gradient"
    builds: ClassVar[str | None] = "implicit_blocks.interfaces:GradientEstimator"
    differentiates_solver: ClassVar[bool] = False
    """Whether autograd goes through the solver's updates, which must then be differentiable."""

    def forward_equivalents(self, iterations: float) -> float | None:
        """Cost of one training step in forward passes of the map, given the iterations of the search.

        A backward pass counts 2. None: not known (the default; override it so that costs can be estimated).
        """
        return None

    @property
    def differentiated_calls(self) -> int:
        """Calls of the map that backward goes through: the `steps` of a kind that has some, else one."""
        return int(getattr(self, "steps", 1))


class PhantomSpec(GradientSpec):
    """Search without gradients, then `steps` damped steps with.

    Geng et al., "On Training Implicit Models", NeurIPS 2021. Biased: the gradient of a truncated series.
    """

    kind: Literal["phantom"] = "phantom"
    steps: PositiveInt = 4
    """k of (s+k): differentiated steps after the search."""
    damping: Damping = 0.8
    """λ of those steps."""

    def forward_equivalents(self, iterations: float) -> float:
        """Count ``iterations + 3 · steps``."""
        return iterations + 3 * self.steps


class UnrolledSpec(GradientSpec):
    """Differentiate `steps` updates of the solver from the start, without stopping early."""

    differentiates_solver: ClassVar[bool] = True

    kind: Literal["unrolled"] = "unrolled"
    steps: PositiveInt = 4
    """Updates taken, all of them differentiated."""
    checkpointing: bool = False
    """Recompute each step in backward, so that memory does not grow with the steps."""

    def forward_equivalents(self, iterations: float) -> float:
        """Count ``3 · steps``, or ``4 · steps`` with checkpointing: there is no search."""
        return (4 if self.checkpointing else 3) * self.steps


class ImplicitFunctionSpec(GradientSpec):
    """The exact gradient by the implicit function theorem: an adjoint fixed point solved in backward."""

    kind: Literal["implicit_function"] = "implicit_function"
    solver: SolverSpec = PicardSpec()
    """Solver of the adjoint equation."""
    stopping: Stopping = Stopping(tolerance=1e-4, max_iterations=64)
    """Stopping rule of the adjoint equation."""

    def forward_equivalents(self, iterations: float) -> float:
        """Count the search, a differentiated call, and the adjoint iterations at their maximum."""
        return iterations + 3 + self.stopping.max_iterations

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        if self.stopping.scope != "sequence":
            message = "the adjoint equation runs backwards through the tokens; its scope must be 'sequence'"
            raise field_error(message, "stopping", "scope", value=self.stopping.scope)
        return self


class JacobianPenaltySpec(GradientSpec):
    """Another gradient, and a penalty on the size of the map's Jacobian, so that searches stay short.

    Bai, Koltun and Kolter, "Stabilizing Equilibrium Models by Jacobian Regularization", ICML 2021.
    """

    kind: Literal["jacobian_penalty"] = "jacobian_penalty"
    gradient: GradientSpec = PhantomSpec()
    """The gradient of the fixed point itself."""
    weight: PositiveFloat = 0.1
    """What ``‖J‖²_F / d`` is multiplied by before it is added to the loss."""
    probes: PositiveInt = 1
    """Random directions it is estimated from; each costs two differentiated calls of the map."""
    step: PositiveFloat = 1e-2
    """Length of the differences along them, relative to the size of z."""

    def forward_equivalents(self, iterations: float) -> float | None:
        """Count the other gradient's and ``6 · probes``."""
        other = self.gradient.forward_equivalents(iterations)
        return None if other is None else other + 6 * self.probes

    @property
    def differentiated_calls(self) -> int:
        """The other gradient's and ``2 · probes``."""
        return self.gradient.differentiated_calls + 2 * self.probes

    @model_validator(mode="after")
    def _at_a_fixed_point(self) -> Self:
        if self.gradient.differentiates_solver:
            message = (
                f"gradient {self.gradient.kind!r} ends after a fixed number of steps, and the penalty is on "
                "the Jacobian at a fixed point; choose 'phantom' or 'implicit_function'"
            )
            raise field_error(message, "gradient", value=self.gradient)
        return self
