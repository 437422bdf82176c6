"""Gradient estimators, one per file: which part of the search is differentiated, and at what cost.

Their specs and their registration are in this file. Importing this package imports no torch; the estimators'
classes are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.solvers import PicardSpec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import Damping, GradientSpec, SolverSpec, Stopping

if TYPE_CHECKING:
    from implicit_blocks.gradients.implicit_function import ImplicitFunction as ImplicitFunction
    from implicit_blocks.gradients.jacobian_penalty import JacobianPenalty as JacobianPenalty
    from implicit_blocks.gradients.last_loops import LastLoops as LastLoops
    from implicit_blocks.gradients.one_step_adjoint import OneStepAdjoint as OneStepAdjoint
    from implicit_blocks.gradients.phantom import Phantom as Phantom
    from implicit_blocks.gradients.phantom import jacobian_free as jacobian_free
    from implicit_blocks.gradients.unrolled import Unrolled as Unrolled


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in gradient estimators."""
    add("gradient", PhantomSpec, "implicit_blocks.gradients.phantom:Phantom.from_spec")
    add("gradient", UnrolledSpec, "implicit_blocks.gradients.unrolled:Unrolled.from_spec")
    add(
        "gradient",
        ImplicitFunctionSpec,
        "implicit_blocks.gradients.implicit_function:ImplicitFunction.from_spec",
    )
    add(
        "gradient",
        JacobianPenaltySpec,
        "implicit_blocks.gradients.jacobian_penalty:JacobianPenalty.from_spec",
    )
    add("gradient", LastLoopsSpec, "implicit_blocks.gradients.last_loops:LastLoops.from_spec")
    add("gradient", OneStepAdjointSpec, "implicit_blocks.gradients.one_step_adjoint:OneStepAdjoint.from_spec")


class PhantomSpec(GradientSpec):
    """Search without gradients, then `steps` damped steps with gradients.

    Geng et al., "On Training Implicit Models", NeurIPS 2021. Biased: the gradient of a truncated series.
    """

    divides_sequences: ClassVar[bool] = True

    kind: Literal["phantom"] = "phantom"
    steps: PositiveInt = 4
    """k of (s+k): differentiated steps after the search."""
    damping: Damping = 0.8
    """λ of those steps."""

    def forward_equivalents(self, iterations: float) -> float:
        """Return ``iterations + 3 · steps``."""
        return iterations + 3 * self.steps


class UnrolledSpec(GradientSpec):
    """Differentiate `steps` updates of the solver from the initial point, without early stopping."""

    differentiates_solver: ClassVar[bool] = True
    searches: ClassVar[bool] = False

    divides_sequences: ClassVar[bool] = True

    kind: Literal["unrolled"] = "unrolled"
    steps: PositiveInt = 4
    """Number of updates, all of them differentiated."""
    checkpointing: bool = False
    """Recompute each step in the backward pass, so that memory does not grow with the steps."""

    def forward_equivalents(self, iterations: float) -> float:
        """Return ``3 · steps``, or ``4 · steps`` with checkpointing; there is no search."""
        return (4 if self.checkpointing else 3) * self.steps


class ImplicitFunctionSpec(GradientSpec):
    """The exact gradient by the implicit function theorem: an adjoint fixed point is solved in backward."""

    divides_sequences: ClassVar[bool] = True

    kind: Literal["implicit_function"] = "implicit_function"
    solver: SolverSpec = PicardSpec()
    """Solver of the adjoint equation."""
    stopping: Stopping = Stopping(tolerance=1e-4, max_iterations=64)
    """Stopping rule of the adjoint equation."""

    def forward_equivalents(self, iterations: float) -> float:
        """Count the search, one differentiated call, and the maximum number of adjoint iterations."""
        return iterations + 3 + self.stopping.max_iterations

    @model_validator(mode="after")
    def _sequence_scope(self) -> Self:
        if self.stopping.scope != "sequence":
            message = "the adjoint equation couples tokens backwards in time; its scope must be 'sequence'"
            raise field_error(message, "stopping", "scope", value=self.stopping.scope)
        return self


class JacobianPenaltySpec(GradientSpec):
    """Another gradient estimator, plus a penalty on the norm of the map's Jacobian, which shortens searches.

    Bai, Koltun and Kolter, "Stabilizing Equilibrium Models by Jacobian Regularization", ICML 2021.
    """

    kind: Literal["jacobian_penalty"] = "jacobian_penalty"
    gradient: GradientSpec = PhantomSpec()
    """The gradient estimator of the fixed point itself."""
    weight: PositiveFloat = 0.1
    """Weight of ``‖J‖²_F / d`` in the loss."""
    probes: PositiveInt = 1
    """Random directions used to estimate the norm; each costs two differentiated calls of the map."""
    step: PositiveFloat = 1e-2
    """Step size of the finite differences along them, relative to the norm of z."""

    def forward_equivalents(self, iterations: float) -> float | None:
        """Return the other estimator's cost plus ``6 · probes``."""
        other = self.gradient.forward_equivalents(iterations)
        return None if other is None else other + 6 * self.probes

    @property
    def differentiated_calls(self) -> int:
        """The other estimator's calls plus ``2 · probes``."""
        return self.gradient.differentiated_calls + 2 * self.probes

    def differentiated_calls_of(self, iterations: int) -> int:
        """Return the other estimator's calls plus ``2 · probes``."""
        return self.gradient.differentiated_calls_of(iterations) + 2 * self.probes

    @model_validator(mode="after")
    def _needs_a_fixed_point(self) -> Self:
        if self.gradient.differentiates_solver:
            message = (
                f"gradient {self.gradient.kind!r} takes a fixed number of steps, and the penalty needs the "
                "Jacobian at a fixed point; choose 'phantom' or 'implicit_function'"
            )
            raise field_error(message, "gradient", value=self.gradient)
        return self


class LastLoopsSpec(GradientSpec):
    """Take a fixed number of loops, undamped, and differentiate the last `loops` of them.

    Truncated backpropagation through time, as looped language models are trained (Geiping et al., 2025). The
    number of loops is that of the model's depth, or else `stopping.max_iterations`. There is no search.
    """

    searches: ClassVar[bool] = False

    divides_sequences: ClassVar[bool] = True

    kind: Literal["last_loops"] = "last_loops"
    loops: PositiveInt | None = None
    """Number of differentiated loops, the last ones; null: all loops."""
    residual_weight: NonNegativeFloat = 0.0
    """Weight of a penalty on the squared relative residual of the last loop, so that later searches converge
    in fewer iterations; 0: none."""

    def forward_equivalents(self, iterations: float) -> float:
        """Return ``iterations + 2 k``, where k is the smaller of `loops` and the iterations."""
        return iterations + 2 * (iterations if self.loops is None else min(self.loops, iterations))

    def differentiated_calls_of(self, iterations: int) -> int:
        """Return the smaller of `loops` and the iterations."""
        return iterations if self.loops is None else min(self.loops, iterations)

    @property
    def differentiated_calls(self) -> int:
        """`loops`; 1 without it, since the number of loops is not part of this spec."""
        return 1 if self.loops is None else self.loops


class OneStepAdjointSpec(GradientSpec):
    """One step of the adjoint equation at the point that the search found, as Attractor models train (2026).

    Biased: two terms of the series whose limit is the gradient of `implicit_function`.
    """

    kind: Literal["one_step_adjoint"] = "one_step_adjoint"
    max_norm_ratio: PositiveFloat | None = None
    """Largest norm of the step of a row, relative to the incoming gradient; null: no limit."""

    def forward_equivalents(self, iterations: float) -> float:
        """Count the search, one differentiated call, and one more vector-Jacobian product."""
        return iterations + 4


if not TYPE_CHECKING:
    __getattr__ = names_of_components(
        __name__, register_components, jacobian_free="implicit_blocks.gradients.phantom"
    )
