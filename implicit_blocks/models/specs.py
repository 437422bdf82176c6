"""Specs and registration of the language models, the implicit one and its explicit twin, and of their MLP.

Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.gradients import PhantomSpec
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.solvers import PicardSpec
from implicit_blocks.specs.base import Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import (
    GradientSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    Norm,
    Scope,
    SolverSpec,
    Stopping,
    linear_shapes,
)


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in MLPs and models."""
    add("mlp", SwiGLUSpec, "implicit_blocks.layers:SwiGLU")
    add("model", ImplicitLMSpec, "implicit_blocks.models.implicit:ImplicitLM")
    add("model", ExplicitLMSpec, "implicit_blocks.models.explicit:ExplicitLM")


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
    """Null: `prefix`, so that no result depends on later tokens, padding or other sequences."""

    def over(self, training: Stopping) -> Stopping:
        """Return the rule of evaluation, given that of training."""
        return Stopping(
            tolerance=training.tolerance if self.tolerance is None else self.tolerance,
            max_iterations=4 * training.max_iterations
            if self.max_iterations is None
            else self.max_iterations,
            norm=self.norm or training.norm,
            scope=self.scope or "prefix",
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


class LanguageModelSpec(ModelSpec):
    """Common base of the implicit model and its explicit twin: embedding, layers, tied head."""

    vocab_size: PositiveInt
    """Number of token ids."""
    pad_vocab_to: PositiveInt = 1
    """Embedding rows are padded up to a multiple of this."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_layers: PositiveInt
    """Number of layers; in the implicit model, of the map that is iterated."""
    mixer: MixerSpec
    """The component that carries information between tokens."""
    mlp: MLPSpec | None = None
    """The component after the mixer in each layer; null: none."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in every norm."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each layer's output dropped in training, with one mask for all iterations."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's weights."""
    embedding_std: PositiveFloat = 0.02
    """Standard deviation of the embedding's initial entries."""
    scale_residual_init: bool = True
    """Scale the initial output projections of the branches by ``1/√(n_layers · branches per layer)``."""
    weight_norm: bool = False
    """Whether weights are ``g · v/‖v‖`` by row, with learned gains ``g``."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `pad_vocab_to`."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @model_validator(mode="after")
    def _widths_fit(self) -> Self:
        for name, part in (("mixer", self.mixer), ("mlp", self.mlp)):
            try:
                if part is not None:
                    part.check(self.d_model)
            except ValueError as error:
                raise field_error(str(error), name, value=part) from None
        return self


class ExplicitLMSpec(LanguageModelSpec):
    """An ordinary language model: each layer once, no injection."""

    twin_of: ClassVar[frozenset[str]] = frozenset({"implicit_lm"})

    kind: Literal["explicit_lm"] = "explicit_lm"


class ImplicitLMSpec(LanguageModelSpec):
    """A language model whose layers are iterated to a fixed point: Schöne et al., ICML 2025."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"solver", "gradient", "stopping", "window_length", "at_evaluation"}
    )
    twin_of: ClassVar[frozenset[str]] = frozenset({"explicit_lm"})

    kind: Literal["implicit_lm"] = "implicit_lm"
    weight_norm: bool = True
    """Whether weights of the map and the injection are ``g · v/‖v‖`` by row, with learned gains ``g``."""
    z_init: Literal["zeros", "embedding"] = "zeros"
    """Initial point of the search."""
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
    at_evaluation: AtEvaluation = AtEvaluation()
    """Search settings that differ in evaluation."""

    @property
    def evaluation_stopping(self) -> Stopping:
        """When the search ends in evaluation."""
        return self.at_evaluation.stopping.over(self.stopping)

    @model_validator(mode="after")
    def _solvers_fit(self) -> Self:
        if self.gradient.differentiates_solver and not self.solver.differentiable:
            message = (
                f"gradient {self.gradient.kind!r} differentiates the solver's updates, and solver "
                f"{self.solver.kind!r} is not differentiable; choose gradient 'phantom' or another solver"
            )
            raise field_error(message, "gradient", value=self.gradient)
        for place, solver, stopping in (
            (("solver",), self.solver, self.stopping),
            (("at_evaluation", "solver"), self.at_evaluation.solver, self.evaluation_stopping),
        ):
            if solver.couples_tokens and stopping.scope == "prefix":
                where = ".".join((*place[:-1], "stopping.scope"))
                message = (
                    f"solver {solver.kind!r} couples the tokens of a row, and with scope 'prefix' no token "
                    f"may depend on later ones; set {where} to 'sequence' or choose another solver"
                )
                raise field_error(message, *place, value=solver)
        if self.at_evaluation.commit_prefix is not None and self.evaluation_stopping.scope != "prefix":
            message = (
                "scope 'sequence' does not determine which tokens have converged and can be committed; "
                "choose at_evaluation.stopping.scope 'prefix', or window_length"
            )
            raise field_error(
                message, "at_evaluation", "commit_prefix", value=self.at_evaluation.commit_prefix
            )
        return self
