"""Specs of stacks of layers: the prelude, the iterated core and the coda. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt

from implicit_blocks.specs.base import Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import MixerSpec, MLPSpec, ScalingSpec, total

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


def _not_empty(value: Any) -> Any:
    if isinstance(value, int) and value < 1:
        raise ValueError("the stack has no layers; choose at least 1, or leave the stack out (null)")
    return value


class StackSpec(Spec):
    """A stack of layers before or after the iterated core. Null: as in the core."""

    n_layers: Annotated[PositiveInt, BeforeValidator(_not_empty)]
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
