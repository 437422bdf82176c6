"""The spec of the implicit language model, and which of its choices fit together; registration of the models.

Imports no torch.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from implicit_blocks import registry
from implicit_blocks.depths import UntilConvergedSpec
from implicit_blocks.exits import FixedExitSpec, ResidualExitSpec
from implicit_blocks.gradients import PhantomSpec
from implicit_blocks.injections import ProjectionSpec
from implicit_blocks.models.objective_specs import LastObjectiveSpec
from implicit_blocks.models.specs import ExplicitLMSpec, LanguageModelSpec
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.solvers import PicardSpec
from implicit_blocks.specs.base import Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import (
    DepthSpec,
    ExitSpec,
    GradientSpec,
    InjectionSpec,
    Norm,
    ObjectiveSpec,
    Scope,
    SolverSpec,
    StartSpec,
    Stopping,
)


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in models."""
    add("model", ImplicitLMSpec, "implicit_blocks.models.implicit:ImplicitLM")
    add("model", ExplicitLMSpec, "implicit_blocks.models.explicit:ExplicitLM")


class StoppingOverrides(Spec):
    """How stopping in evaluation differs from training; null keeps the value of training."""

    tolerance: NonNegativeFloat | None = None
    """Null: as in training."""
    max_iterations: PositiveInt | None = None
    """Null: 4 times training's."""
    norm: Norm | None = None
    """Null: as in training."""
    scope: Scope | None = None
    """Null: `prefix`, so that no result depends on later tokens, padding or other sequences.

    For mixers that see later tokens null is `sequence`.
    """

    def over(self, training: Stopping, *, scope: Scope = "prefix") -> Stopping:
        """Return the rule of evaluation, given that of training and the scope that null stands for."""
        return Stopping(
            tolerance=training.tolerance if self.tolerance is None else self.tolerance,
            max_iterations=self.max_iterations or 4 * training.max_iterations,
            norm=self.norm or training.norm,
            scope=self.scope or scope,
        )


class AtEvaluation(Spec):
    """Search settings in evaluation."""

    solver: SolverSpec = PicardSpec(damping=0.8)
    """Damped, because evaluation iterates until convergence, where training may stop earlier."""
    stopping: StoppingOverrides = StoppingOverrides()
    """How stopping differs from training."""
    window_length: PositiveInt | None = None
    """Tokens per window, searched in order, each given those before it; null: all tokens at once."""
    commit_prefix: PositiveInt | None = None
    """Commit converged tokens, in multiples of this number, once all sequences have them; null: never.

    For scope `prefix`; choose a multiple of the mixer's chunk.
    """
    exit: ExitSpec = ResidualExitSpec()
    """When a token leaves the search; by default once its residual is within the tolerance."""

    @property
    def fixed_loops(self) -> int | None:
        """The number of loops of exit criterion `fixed`; None: another criterion decides."""
        return self.exit.loops if isinstance(self.exit, FixedExitSpec) else None


class ImplicitLMSpec(LanguageModelSpec):
    """A language model whose layers are iterated to a fixed point: Schöne et al., ICML 2025."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"solver", "gradient", "stopping", "depth", "objective", "window_length", "at_evaluation"}
    )
    twin_of: ClassVar[frozenset[str]] = frozenset({"explicit_lm"})

    kind: Literal["implicit_lm"] = "implicit_lm"
    weight_norm: bool = True
    """Whether weights of the map and the injection are ``g · v/‖v‖`` by row, with learned gains ``g``."""
    injection: InjectionSpec = ProjectionSpec()
    """How the prelude's output enters the core."""
    z_init: StartSpec | None = None
    """Initial point of the search; null: as is usual with the injection."""
    depth: DepthSpec = UntilConvergedSpec()
    """Number of loops in training; by default the stopping rule ends them."""
    solver: SolverSpec = PicardSpec()
    """Update rule of the search in training."""
    gradient: GradientSpec = PhantomSpec()
    """Which part of the search is differentiated."""
    stopping: Stopping = Stopping()
    """When the search ends in training."""
    window_length: PositiveInt | None = None
    """Tokens per window in training, each window given those before it; null: all tokens at once.

    The gradient's own steps cover the whole sequence. `unrolled` ignores windows; `last_loops` rejects them.
    """
    objective: ObjectiveSpec = LastObjectiveSpec()
    """The loss, given the iterates of the core; by default that of the last one."""
    exit_gate: bool = False
    """Whether there is a learned gate that reads when a token may leave the loop, as in Ouro."""
    state_policy: Literal["converged", "per_loop"] = "converged"
    """The state that later tokens see: `converged`, or one state per loop, as in Huginn and Ouro."""
    at_evaluation: AtEvaluation = AtEvaluation()
    """Search settings that differ in evaluation."""

    @property
    def start(self) -> StartSpec:
        """The initial point of the search."""
        if self.z_init is not None:
            return self.z_init
        start: StartSpec = registry.entry("start", self.injection.z_init).spec()
        return start

    @property
    def norm_in_core(self) -> bool:
        """Whether a norm ends the core."""
        return self.injection.core_norm if self.core_norm is None else self.core_norm

    @property
    def plain(self) -> bool:
        """Whether the model has the shape of the paper's: see `LanguageModelSpec.plain`."""
        return (
            super().plain
            and isinstance(self.injection, ProjectionSpec)
            and self.start.kind in ("zeros", "embedding")
            and not (self.start.noise_std or self.exit_gate)
        )

    @property
    def injection_table_width(self) -> int | None:
        """Width of the term that the injection adds to the mixers' projections; 0: none. None: not known."""
        if not self.injection.adds_to_projections:
            return 0
        return self.core.layers[0].mixer.injection_width(self.core_width)

    @property
    def state_loops(self) -> int:
        """Number of states that each layer of the core keeps: 1, or one per loop."""
        return 1 if self.state_policy == "converged" else self.at_evaluation.fixed_loops or 1

    @property
    def evaluation_stopping(self) -> Stopping:
        """When the search ends in evaluation."""
        scope: Scope = "sequence" if self.bidirectional else "prefix"
        return self.at_evaluation.stopping.over(self.stopping, scope=scope)

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        check_choices(self)
        return self


# ------------------------------------------------------------------------------------ fitting choices


def check_choices(spec: ImplicitLMSpec) -> None:
    """Check that solver, gradient, depth, objective, injection, start, exit and state policy fit together.

    Raises:
        ValueError: two of them do not; names the place, the value and the remedy.

    """
    _check_bidirectional(spec)
    _check_solvers(spec)
    _check_ends(spec)
    _check_depth(spec)
    _check_objective(spec)
    _check_exit(spec)


def check_reconfigured(old: ImplicitLMSpec, new: ImplicitLMSpec) -> None:
    """Check that a new spec of a built model changes only what can change.

    Raises:
        ValueError: another field differs.

    """
    free = new.changeable
    before, after = old.model_dump(exclude=set(free)), new.model_dump(exclude=set(free))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise ValueError(
            f"{', '.join(changed)} cannot change after a model is built; only {', '.join(sorted(free))} can"
        )


def _check_solvers(spec: ImplicitLMSpec) -> None:
    if spec.gradient.differentiates_solver and not spec.solver.differentiable:
        message = (
            f"gradient {spec.gradient.kind!r} differentiates the solver's updates, and solver "
            f"{spec.solver.kind!r} is not differentiable; choose gradient 'phantom' or another solver"
        )
        raise field_error(message, "gradient", value=spec.gradient)
    for place, solver, stopping in (
        (("solver",), spec.solver, spec.stopping),
        (("at_evaluation", "solver"), spec.at_evaluation.solver, spec.evaluation_stopping),
    ):
        if solver.couples_tokens and stopping.scope == "prefix":
            where = ".".join((*place[:-1], "stopping.scope"))
            message = (
                f"solver {solver.kind!r} couples the tokens of a row, and with scope 'prefix' no token "
                f"may depend on later ones; set {where} to 'sequence' or choose another solver"
            )
            raise field_error(message, *place, value=solver)
    if spec.at_evaluation.commit_prefix is not None and spec.evaluation_stopping.scope != "prefix":
        message = (
            "scope 'sequence' does not determine which tokens have converged and can be committed; "
            "choose at_evaluation.stopping.scope 'prefix', or window_length"
        )
        raise field_error(message, "at_evaluation", "commit_prefix", value=spec.at_evaluation.commit_prefix)


def _check_ends(spec: ImplicitLMSpec) -> None:
    """Check the widths of the injection, the start and the core, and the mixers that add an injection."""
    ends = (("injection", spec.injection), ("z_init", spec.start))
    for place, end in ends if spec.d_model != spec.core_width else ():  # every kind supports equal widths
        try:
            end.check(spec.d_model, spec.core_width)
        except ValueError as error:
            raise field_error(str(error), place, value=end) from None
    if spec.core_width != spec.d_model and not spec.core_projection:
        message = (
            f"the core's width {spec.core_width} differs from d_model {spec.d_model}; set "
            "core_projection: true, so that a linear map follows the core"
        )
        raise field_error(message, "core_d_model", value=spec.core_d_model)
    if not (spec.injection.injects or spec.start.depends_on_tokens or spec.core_residual):
        message = (
            f"with injection {spec.injection.kind!r} only the start of the loop depends on the tokens, and "
            f"start {spec.start.kind!r} does not; choose z_init 'prelude' or another injection"
        )
        raise field_error(message, "z_init", value=spec.start)
    if spec.injection.adds_to_projections:
        widths = {layer.mixer.injection_width(spec.core_width) for layer in spec.core.layers}
        if len(widths) > 1:
            message = (
                f"injection {spec.injection.kind!r} adds one term to the projections of all mixers, but "
                f"those of the core have widths {sorted(map(str, widths))}; choose injection 'residual', "
                "'add' or 'concat', or mixers of equal width"
            )
            raise field_error(message, "injection", value=spec.injection)


def _check_depth(spec: ImplicitLMSpec) -> None:
    """Check that the gradient estimator can use the number of loops and the windows."""
    chosen = spec.depth.kind != "until_converged"
    if chosen and not spec.gradient.searches and spec.gradient.kind != "last_loops":
        message = (
            f"gradient {spec.gradient.kind!r} has its own number of steps, and depth {spec.depth.kind!r} "
            "another; choose gradient 'last_loops'"
        )
        raise field_error(message, "depth", value=spec.depth)
    if getattr(spec.depth, "per", "batch") == "sequence" and spec.gradient.kind != "last_loops":
        message = (
            f"gradient {spec.gradient.kind!r} searches with one number of iterations for all rows; choose "
            "gradient 'last_loops', or depth per batch"
        )
        raise field_error(message, "depth", "per", value="sequence")
    if spec.window_length and getattr(spec.gradient, "gradient", spec.gradient).kind == "last_loops":
        message = "gradient 'last_loops' has no search that windows could divide; set window_length: null"
        raise field_error(message, "window_length", value=spec.window_length)


def _check_objective(spec: ImplicitLMSpec) -> None:
    """Check that the objective finds the iterates and the exit gate that it reads."""
    if spec.objective.reads_iterates and spec.gradient.kind != "last_loops":
        message = (
            f"objective {spec.objective.kind!r} reads iterates with gradients, which gradient "
            f"{spec.gradient.kind!r} does not keep; choose gradient 'last_loops'"
        )
        raise field_error(message, "objective", value=spec.objective)
    if spec.objective.needs_gate and not spec.exit_gate:
        message = f"objective {spec.objective.kind!r} reads the exit gate; set exit_gate: true"
        raise field_error(message, "objective", value=spec.objective)
    if not spec.objective.reads_iterates:
        return
    until_converged = spec.depth.kind == "until_converged"
    most = spec.stopping.max_iterations if until_converged else spec.depth.maximum_loops()
    latest = spec.objective.latest_iterate
    if most is not None and latest is not None and latest > most:
        whose = "stopping.max_iterations" if until_converged else f"depth {spec.depth.kind!r}"
        message = (
            f"iterate {latest} is never reached, because {whose} allows at most {most} loops; choose others "
            f"up to {most}, or more loops"
        )
        raise field_error(message, "objective", value=spec.objective)


def _check_exit(spec: ImplicitLMSpec) -> None:
    """Check the exit criterion and the state policy of evaluation."""
    at_evaluation, place = spec.at_evaluation, ("at_evaluation", "exit")
    leaves = at_evaluation.exit.kind
    if leaves == "gate" and not spec.objective.needs_gate:
        untrained = f"objective {spec.objective.kind!r} does not train the exit gate;"
        problem = untrained if spec.exit_gate else "the model has no exit gate; set exit_gate: true and"
        message = f"{problem} choose objective 'exit_expectation' or 'exit_mixture', or another exit"
        raise field_error(message, *place, value=at_evaluation.exit)
    if at_evaluation.exit.per_token and spec.evaluation_stopping.scope != "prefix":
        message = (
            f"exit criterion {leaves!r} decides for each token, and scope 'sequence' for whole rows; choose "
            "at_evaluation.stopping.scope 'prefix'"
        )
        raise field_error(message, *place, value=at_evaluation.exit)
    if spec.state_policy == "per_loop" and leaves != "fixed":
        message = (
            f"one state per loop needs a fixed number of loops, and exit criterion {leaves!r} has none; "
            "set at_evaluation.exit: {kind: fixed, loops: …}"
        )
        raise field_error(message, "state_policy", value="per_loop")
    for name in ("window_length", "commit_prefix") if leaves == "fixed" else ():
        if (value := getattr(at_evaluation, name)) is not None:
            message = f"with a fixed number of loops there is no search; set at_evaluation.{name}: null"
            raise field_error(message, "at_evaluation", name, value=value)


def _check_bidirectional(spec: ImplicitLMSpec) -> None:
    """Refuse windows, prefix scope and exits per token where a mixer sees later tokens."""
    if not spec.bidirectional:
        return
    windows = "windows cannot be solved in order; use null"
    prefix = "no prefix converges alone; choose scope 'sequence'"
    places = (
        (("window_length",), spec.window_length, windows),
        (("at_evaluation", "window_length"), spec.at_evaluation.window_length, windows),
        (("at_evaluation", "commit_prefix"), spec.at_evaluation.commit_prefix, windows),
        (("stopping", "scope"), spec.stopping.scope, prefix),
        (("at_evaluation", "stopping", "scope"), spec.evaluation_stopping.scope, prefix),
    )
    for place, value, reason in places:
        if value not in (None, "sequence"):
            raise field_error(f"a mixer sees later tokens, so that {reason}", *place, value=value)
    if spec.at_evaluation.exit.per_token:
        message = (
            "a mixer sees later tokens, so that no token leaves before the others; choose exit 'residual' or "
            "'fixed'"
        )
        raise field_error(message, "at_evaluation", "exit", value=spec.at_evaluation.exit)
