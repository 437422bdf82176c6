"""Language models: the implicit one, and its explicit twin with one field changed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs.base import ComponentSpec, Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.gradients import GradientSpec, PhantomSpec
from implicit_blocks.specs.layers import MixerSpec, MLPSpec
from implicit_blocks.specs.solvers import PicardSpec, SolverSpec, Stopping, StoppingOverrides


class ModelSpec(ComponentSpec):
    """Base of all models' specs."""

    family: ClassVar[str] = "model"
    changeable: ClassVar[frozenset[str]] = frozenset()
    """Fields that a phase of training may change, the weights staying as they are."""
    twin_of: ClassVar[frozenset[str]] = frozenset()
    """Kinds from which a spec switches to this one by `kind` alone, keeping the fields that both know."""

    def parameter_total(self) -> int | None:
        """Parameters of the model, tied ones once. None: not known (language models: `counting`)."""
        return None


class AtEvaluation(Spec):
    """How the fixed point is searched for in evaluation."""

    solver: SolverSpec = PicardSpec(damping=0.8)
    """Damped, because evaluation goes on to convergence where training may not."""
    stopping: StoppingOverrides = StoppingOverrides()
    """What differs from the stopping rule of training."""
    window_length: PositiveInt | None = None
    """Tokens searched at a time, each window given those before it; null: all together."""
    commit_prefix: PositiveInt | None = None
    """Leave tokens behind that are done in every sequence, at multiples of so many; null: iterate on them.

    For scope `prefix`; choose a multiple of the mixer's chunk.
    """


class LanguageModelSpec(ModelSpec):
    """What the implicit model and its explicit twin share: embedding, layers, tied head."""

    vocab_size: PositiveInt
    """Number of token ids."""
    pad_vocab_to: PositiveInt = 1
    """Embedding rows are padded up to a multiple of this."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_layers: PositiveInt
    """Layers, or layers of the map that is iterated."""
    mixer: MixerSpec
    """What carries information between tokens."""
    mlp: MLPSpec | None = None
    """What follows the mixer in each layer; null: nothing."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in every norm."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each layer's output dropped in training, one mask for all iterations."""
    tie_embeddings: bool = True
    """Whether the head is the embedding."""
    embedding_std: PositiveFloat = 0.02
    """Standard deviation of the embedding's initial entries."""
    scale_residual_init: bool = True
    """Start output projections of the branches smaller, by ``1/√(n_layers · branches a layer)``."""
    weight_norm: bool = False
    """Whether weights are ``g · v/‖v‖`` by row, with learned gains ``g``."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` up to a multiple of `pad_vocab_to`."""
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
    """Where the search begins."""
    solver: SolverSpec = PicardSpec()
    """Update rule of the search in training."""
    gradient: GradientSpec = PhantomSpec()
    """What of the search is differentiated."""
    stopping: Stopping = Stopping()
    """When the search ends in training."""
    window_length: PositiveInt | None = None
    """Tokens searched at a time in training, each window given those before it; null: all together.

    The gradient's own steps are taken over the whole sequence; `unrolled`, which has no search, ignores it.
    """
    at_evaluation: AtEvaluation = AtEvaluation()
    """What differs in evaluation."""

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
                    f"solver {solver.kind!r} mixes the tokens of a row; scope 'prefix' promises that none "
                    f"depends on later ones; set {where} to 'sequence' or choose another solver"
                )
                raise field_error(message, *place, value=solver)
        if self.at_evaluation.commit_prefix is not None and self.evaluation_stopping.scope != "prefix":
            message = (
                "tokens are committed as they converge, which scope 'sequence' does not look at; choose "
                "at_evaluation.stopping.scope 'prefix', or window_length"
            )
            raise field_error(
                message, "at_evaluation", "commit_prefix", value=self.at_evaluation.commit_prefix
            )
        return self
