"""Specs and registration of the language models, the implicit one and its explicit twin, and of their MLP.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from implicit_blocks import registry
from implicit_blocks.depths import UntilConvergedSpec
from implicit_blocks.exits import FixedExitSpec, ResidualExitSpec
from implicit_blocks.gradients import PhantomSpec
from implicit_blocks.injections import ProjectionSpec
from implicit_blocks.mlps import FeedForwardSpec
from implicit_blocks.models.compatibility import check_choices
from implicit_blocks.models.objective_specs import (
    ExitExpectationSpec,
    ExitMixtureSpec,
    IteratesObjectiveSpec,
    LastObjectiveSpec,
)
from implicit_blocks.models.stack_specs import LayerSpec, NormPlacement, Stack, StackSpec, expand
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.scalings import PlainSumSpec
from implicit_blocks.solvers import PicardSpec
from implicit_blocks.specs.base import Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import (
    DepthSpec,
    ExitSpec,
    GradientSpec,
    InjectionSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    Norm,
    ObjectiveSpec,
    ScalingSpec,
    Scope,
    SolverSpec,
    StartSpec,
    Stopping,
    hidden_plan,
    linear_shapes,
)
from implicit_blocks.specs.tensor_plan import TensorPlan


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in MLPs and models."""
    add("mlp", SwiGLUSpec, "implicit_blocks.layers:SwiGLU")
    add("objective", LastObjectiveSpec, "implicit_blocks.models.objectives:LastObjective.from_spec")
    add("objective", IteratesObjectiveSpec, "implicit_blocks.models.objectives:IteratesObjective.from_spec")
    add("objective", ExitMixtureSpec, "implicit_blocks.models.objectives:ExitMixture.from_spec")
    add("objective", ExitExpectationSpec, "implicit_blocks.models.objectives:ExitExpectation.from_spec")
    add("mlp", FeedForwardSpec, "implicit_blocks.mlps.feed_forward:FeedForward")
    add("model", ImplicitLMSpec, "implicit_blocks.models.implicit:ImplicitLM")
    add("model", ExplicitLMSpec, "implicit_blocks.models.explicit:ExplicitLM")


def _not_empty(value: Any) -> Any:
    if isinstance(value, int) and value < 1:
        raise ValueError("the core has no layers; choose at least 1, because it is what is iterated")
    return value


class SwiGLUSpec(MLPSpec):
    """``W_out (silu(W_gate z) · W_up z)``."""

    kind: Literal["swiglu"] = "swiglu"
    d_ff: PositiveInt
    """Hidden width; the paper uses ``int(2/3 · 4 · d_model)``."""
    bias: bool = False
    """Whether the three layers have biases."""

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the three projections."""
        shapes = linear_shapes("gate_proj", self.d_ff, d_model, bias=self.bias)
        shapes |= linear_shapes("up_proj", self.d_ff, d_model, bias=self.bias)
        return shapes | linear_shapes("out_proj", d_model, self.d_ff, bias=self.bias)

    def tensor_plan(self, d_model: int) -> TensorPlan:
        """Divide the hidden channels."""
        return hidden_plan(("gate_proj", "up_proj"), "out_proj", self.d_ff, bias=self.bias)

    def headline(self, d_model: int) -> str:
        """Return the hidden width."""
        return f"hidden width {self.d_ff}"

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count three matrix products."""
        return float(6 * d_model * self.d_ff)


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
            max_iterations=4 * training.max_iterations
            if self.max_iterations is None
            else self.max_iterations,
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


class LanguageModelSpec(ModelSpec):
    """Common base of the implicit model and its explicit twin.

    ``embedding → prelude → core → coda → head``: the prelude and the coda run once, the core is iterated in
    the implicit model. Without `prelude` and `coda` the core is the whole model. The fields of a layer apply
    to all stacks, unless `prelude` or `coda` has its own.
    """

    vocab_size: PositiveInt
    """Number of token ids."""
    pad_vocab_to: PositiveInt = 1
    """Embedding rows are padded up to a multiple of this."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_layers: Annotated[PositiveInt, BeforeValidator(_not_empty)]
    """Number of layers of the core; in the implicit model, of the map that is iterated."""
    mixer: MixerSpec
    """The component that carries information between tokens; by default the first one of `layers`."""
    mlp: MLPSpec | None = None
    """The component after the mixer in each layer; null: none."""
    layers: tuple[LayerSpec, ...] = ()
    """A pattern of layers of different kinds, repeated until `n_layers` are filled; empty: all are alike."""
    prelude: StackSpec | None = None
    """Layers that run once before the core; null: none."""
    coda: StackSpec | None = None
    """Layers that run once after the core; null: none."""
    prelude_norm: bool = False
    """Whether a norm follows the prelude."""
    core_d_model: PositiveInt | None = None
    """Width of the core; null: `d_model`."""
    core_projection: bool = False
    """Whether a linear map from the core's width to `d_model` follows the core."""
    core_projection_bias: bool = False
    """Whether that map has a bias."""
    core_norm: bool | None = None
    """Whether a norm ends the core, and is iterated with it; else the model's only norm follows the coda.

    Null: as is usual with the injection; in the explicit model, if there is neither prelude nor coda.
    """
    core_residual: bool = False
    """Whether the coda reads the sum of the prelude's and the core's outputs."""
    norm_before_coda: bool = False
    """Whether the norm after the coda, with the same weights, is also applied before it, as in Huginn."""
    norm_placement: NormPlacement = "pre"
    """Where layers normalize, for each branch f with norms N₁ and N₂.

    `pre`: z + f(N₁ z); `post`: N₂(z + f(z)); `sandwich`: z + N₂ f(N₁ z); `pre_post`: N₂(z + f(N₁ z)).
    """
    residual_scaling: ScalingSpec = PlainSumSpec()
    """How the branches of a layer are scaled before they are added to the stream."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in every norm."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each layer's output dropped in training, with one mask for all iterations."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's weights."""
    embedding_std: PositiveFloat = 0.02
    """Standard deviation of the embedding's initial entries."""
    embedding_scale: PositiveFloat = 1.0
    """Factor by which embedded tokens are multiplied."""
    logit_scale: PositiveFloat = 1.0
    """Factor by which logits are multiplied."""
    logit_softcap: PositiveFloat | None = None
    """c in ``c · tanh(logits / c)``; null: no soft cap."""
    scale_residual_init: bool = True
    """Scale the initial output projections of the branches by ``1/√(n_layers · branches per layer)``."""
    weight_norm: bool = False
    """Whether weights are ``g · v/‖v‖`` by row, with learned gains ``g``."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `pad_vocab_to`."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def core_width(self) -> int:
        """Width of the core."""
        return self.d_model if self.core_d_model is None else self.core_d_model

    @property
    def core(self) -> Stack:
        """The layers of the core."""
        layers = expand(self.layers, self.n_layers, mixer=self.mixer, mlp=self.mlp)
        return Stack(self.core_width, layers, self.norm_placement, self.residual_scaling)

    def stack_of(self, name: Literal["prelude", "coda"]) -> Stack | None:
        """Return the layers of the prelude or the coda; None without it."""
        stack: StackSpec | None = getattr(self, name)
        if stack is None:
            return None
        pattern = stack.layers
        if pattern is None:  # a mixer or MLP of its own replaces the core's pattern
            pattern = self.layers if stack.mixer is None and stack.mlp is None else ()
        layers = expand(
            pattern,
            stack.n_layers,
            mixer=self.mixer if stack.mixer is None else stack.mixer,
            mlp=self.mlp if stack.mlp is None else stack.mlp,
            of=name,
            inherited=stack.layers is None and bool(pattern),
        )
        return Stack(
            self.d_model,
            layers,
            stack.norm_placement or self.norm_placement,
            stack.residual_scaling or self.residual_scaling,
        )

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name, in order: prelude, core, coda; those that do not exist are missing."""
        stacks = {"prelude": self.stack_of("prelude"), "core": self.core, "coda": self.stack_of("coda")}
        return {name: stack for name, stack in stacks.items() if stack is not None}

    @property
    def total_layers(self) -> int:
        """Number of layers of all stacks."""
        return sum(len(stack.layers) for stack in self.stacks.values())

    @property
    def plain(self) -> bool:
        """Whether there is only a core of the model's width, with pre-norm layers that are all alike.

        The model then has the shape that its published formats can express.
        """
        return (
            self.prelude is None
            and self.coda is None
            and self.core.uniform
            and self.norm_placement == "pre"
            and self.residual_scaling.plain
            and not (self.core_d_model or self.core_projection or self.core_residual or self.prelude_norm)
            and self.norm_in_core
            and self.embedding_scale == self.logit_scale == 1
            and self.logit_softcap is None
        )

    @property
    def norm_in_core(self) -> bool:
        """Whether a norm ends the core."""
        return self.prelude is None and self.coda is None if self.core_norm is None else self.core_norm

    @property
    def final_norm(self) -> bool:
        """Whether a norm follows the coda; else the core's norm is the last one."""
        return not self.norm_in_core or self.coda is not None or self.core_projection or self.core_residual

    @property
    def bidirectional(self) -> bool:
        """Whether a mixer sees later tokens."""
        mixers = [layer.mixer for stack in self.stacks.values() for layer in stack.layers]
        return any(not mixer.is_causal for mixer in mixers)

    @model_validator(mode="before")
    @classmethod
    def _mixer_of_pattern(cls, value: Any) -> Any:
        """Take the mixer from the first layer of the pattern that names one."""
        if not isinstance(value, Mapping) or value.get("mixer") is not None:
            return value
        pattern = value.get("layers")
        named = [entry for entry in pattern if _mixer_in(entry)] if isinstance(pattern, list | tuple) else []
        return {**value, "mixer": _mixer_in(named[0])} if named else value

    @model_validator(mode="after")
    def _widths_fit(self) -> Self:
        if self.core_width != self.d_model and not self.core_projection:
            message = (
                f"the core's width {self.core_width} differs from d_model {self.d_model}; set "
                "core_projection: true, so that a linear map follows the core"
            )
            raise field_error(message, "core_d_model", value=self.core_d_model)
        if self.core_residual and self.core_width != self.d_model and not self.core_projection:
            raise field_error("needs a core of the model's width", "core_residual", value=True)
        for name, stack in self.stacks.items():
            place = () if name == "core" else (name,)
            for layer in stack.layers:
                for key, part in (("mixer", layer.mixer), ("mlp", layer.mlp)):
                    try:
                        if part is not None:
                            part.check(stack.d_model)
                    except ValueError as error:
                        raise field_error(str(error), *place, key, value=part) from None
        return self

    @model_validator(mode="after")
    def _norm_before_coda_fits(self) -> Self:
        if self.norm_before_coda and not self.final_norm:
            message = "the core ends with the model's only norm; set core_norm: false"
            raise field_error(message, "norm_before_coda", value=True)
        return self


def _mixer_in(entry: Any) -> Any:
    return entry.get("mixer") if isinstance(entry, Mapping) else getattr(entry, "mixer", None)


class ExplicitLMSpec(LanguageModelSpec):
    """An ordinary language model: prelude, core and coda run once, without injection."""

    twin_of: ClassVar[frozenset[str]] = frozenset({"implicit_lm"})

    kind: Literal["explicit_lm"] = "explicit_lm"

    @model_validator(mode="after")
    def _core_has_the_width_of_the_model(self) -> Self:
        if self.core_width != self.d_model:
            message = (
                f"without an injection nothing maps the stream of width {self.d_model} to a core of width "
                f"{self.core_width}; set core_d_model: null"
            )
            raise field_error(message, "core_d_model", value=self.core_d_model)
        return self


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

    The gradient's own steps cover the whole sequence; `unrolled`, which has no search, ignores it.
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
