"""Specs of stacks of layers, and of language models made of them: the base of all, and the explicit model.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.scalings import PlainSumSpec
from implicit_blocks.specs.base import Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import MixerSpec, MLPSpec, ModelSpec, ScalingSpec, total

# ------------------------------------------------------------------------------------ stacks

NormPlacement = Literal["pre", "post", "sandwich", "pre_post"]
"""Where a layer normalizes, for each of its branches f with norms N₁ and N₂: `pre` is ``z + f(N₁ z)``, `post`
``N₂(z + f(z))``, `sandwich` ``z + N₂ f(N₁ z)``, `pre_post` ``N₂(z + f(N₁ z))``."""

MOST_LAYERS = 65_536
"""Largest number of layers of a stack."""


class LayerSpec(Spec):
    """An entry of a pattern of layers."""

    mixer: MixerSpec | None = None
    """The mixer of these layers; null: the stack's."""
    mlp: MLPSpec | None = None
    """The MLP of these layers; null: the stack's."""
    repeat: PositiveInt = 1
    """Number of consecutive layers of this kind."""


def _stack_not_empty(value: Any) -> Any:
    if isinstance(value, int) and value < 1:
        raise ValueError("the stack has no layers; choose at least 1, or leave the stack out (null)")
    return value


class StackSpec(Spec):
    """A stack of layers before or after the iterated core. Null: as in the core."""

    n_layers: Annotated[PositiveInt, BeforeValidator(_stack_not_empty)]
    """Number of layers."""
    layers: tuple[LayerSpec, ...] | None = None
    """A pattern of layers, repeated until `n_layers` are filled; empty: all layers are alike."""
    mixer: MixerSpec | None = None
    """The mixer of layers that do not name one."""
    mlp: MLPSpec | None = None
    """The MLP of layers that do not name one."""
    norm_placement: NormPlacement | None = None
    """Where layers normalize."""
    residual_scaling: ScalingSpec | None = None
    """How branches are scaled before they are added to the stream."""


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, with nothing left to inherit."""

    mixer: MixerSpec
    mlp: MLPSpec | None

    @property
    def parts(self) -> tuple[MixerSpec | MLPSpec, ...]:
        """The mixer, and the MLP if there is one."""
        return (self.mixer,) if self.mlp is None else (self.mixer, self.mlp)


@dataclass(frozen=True)
class Stack:
    """A stack of layers, with nothing left to inherit."""

    d_model: int
    layers: tuple[Layer, ...]
    norm_placement: NormPlacement
    residual_scaling: ScalingSpec

    @property
    def norms_per_branch(self) -> int:
        """The number of norms that each branch of a layer has."""
        return 2 if self.norm_placement in ("sandwich", "pre_post") else 1

    @property
    def parts(self) -> tuple[MixerSpec | MLPSpec, ...]:
        """All mixers and MLPs, in order."""
        return tuple(part for layer in self.layers for part in layer.parts)

    @property
    def uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(set(map(repr, self.layers))) == 1

    def flops_per_token(self, length: int) -> float | None:
        """Return the FLOPs of all layers per token, in sequences of `length` tokens. None: not known."""
        return total(part.flops_per_token(self.d_model, length) for part in self.parts)

    def parameter_count(self, *, weight_norm: bool) -> tuple[int | None, int | None]:
        """Return the numbers of parameters and of the gains of weight norm. None: not known."""
        counts = [part.parameter_count(self.d_model) for part in self.parts]
        weights = total(None if count is None else count.weights for count in counts)
        rows = total(None if count is None else count.weight_normed_rows for count in counts)
        norms = self.norms_per_branch * len(counts) * self.d_model
        scalings = len(counts) * self.residual_scaling.parameter_count(self.d_model)
        return (
            None if weights is None else weights + norms + scalings,
            rows if weight_norm else 0,
        )


def expand(
    pattern: tuple[LayerSpec, ...],
    n_layers: int,
    *,
    mixer: MixerSpec,
    mlp: MLPSpec | None,
    of: str | None = None,
    inherited: bool = False,
) -> tuple[Layer, ...]:
    """Return the layers of a stack: the pattern repeated, entries without a mixer or MLP given these.

    ``of`` names the field of the stack in the model's spec, None for the core, and ``inherited`` says whether
    the pattern is the core's, for the error.

    Raises:
        ValueError: the pattern does not fill the layers a whole number of times, or there are too many layers
            to list.

    """
    if n_layers > MOST_LAYERS:
        message = f"n_layers is {n_layers}; choose at most {MOST_LAYERS}"
        raise field_error(message, "n_layers", value=n_layers)
    period = [
        Layer(entry.mixer if entry.mixer is not None else mixer, entry.mlp if entry.mlp is not None else mlp)
        for entry in pattern
        for _ in range(entry.repeat)
    ] or [Layer(mixer, mlp)]
    if n_layers % len(period):
        whose = "core's pattern" if inherited else "pattern"
        remedy = f"set {of}.layers: [] for layers that are alike" if inherited else "change `layers`"
        message = (
            f"n_layers {n_layers} is not a multiple of the {len(period)} layers of the {whose}; choose a "
            f"multiple, or {remedy}"
        )
        place = () if of is None else (of,)
        raise field_error(message, *place, "n_layers" if inherited else "layers", value=n_layers)
    return tuple(period * (n_layers // len(period)))


# ------------------------------------------------------------------------------------ models


def _core_not_empty(value: Any) -> Any:
    if isinstance(value, int) and value < 1:
        raise ValueError("the core has no layers; choose at least 1, because it is what is iterated")
    return value


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
    n_layers: Annotated[PositiveInt, BeforeValidator(_core_not_empty)]
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
        if self.core_projection_bias and not self.core_projection:
            message = "no linear map follows the core, so that none has a bias; set core_projection: true"
            raise field_error(message, "core_projection_bias", value=True)
        for name, stack in self.stacks.items():
            for layer in stack.layers:
                for key, part in (("mixer", layer.mixer), ("mlp", layer.mlp)):
                    try:
                        if part is not None:
                            part.check(stack.d_model)
                    except ValueError as error:
                        raise field_error(str(error), *self._place_of(name, key, part), value=part) from None
        return self

    def _place_of(self, name: str, key: str, part: Any) -> tuple[str | int, ...]:
        """Return the field that a stack's mixer or MLP comes from, which may be one of the core."""
        stack = None if name == "core" else getattr(self, name)
        for place, owner in (((name,), stack), ((), self)):
            for number, entry in enumerate(getattr(owner, "layers", None) or ()):
                if getattr(entry, key) is part:
                    return (*place, "layers", number, key)
        return (name, key) if getattr(stack, key, None) is part else (key,)

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
