"""Residual scalings: how a branch is added to the residual stream. Specs and registration are in this file.

Importing this package imports no torch; the modules are imported on first use. A kind is built as
``build(spec, d_model=…, n_layers=…)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import PositiveFloat, model_validator

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import ScalingSpec

if TYPE_CHECKING:
    from implicit_blocks.scalings.scaling import BoundedGate as BoundedGate
    from implicit_blocks.scalings.scaling import DeepNorm as DeepNorm
    from implicit_blocks.scalings.scaling import LayerScale as LayerScale
    from implicit_blocks.scalings.scaling import PlainSum as PlainSum
    from implicit_blocks.scalings.scaling import Scaling as Scaling


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in residual scalings."""
    add("scaling", PlainSumSpec, "implicit_blocks.scalings.scaling:PlainSum")
    add("scaling", LayerScaleSpec, "implicit_blocks.scalings.scaling:LayerScale")
    add("scaling", BoundedGateSpec, "implicit_blocks.scalings.scaling:BoundedGate")
    add("scaling", DeepNormSpec, "implicit_blocks.scalings.scaling:DeepNorm")


class PlainSumSpec(ScalingSpec):
    """``stream + branch``."""

    plain: ClassVar[bool] = True

    kind: Literal["none"] = "none"


class LayerScaleSpec(ScalingSpec):
    """``stream + γ branch`` with a learned γ per channel."""

    kind: Literal["layer_scale"] = "layer_scale"
    init: PositiveFloat = 0.1
    """Initial value of gamma; CaiT uses 0.1 up to 18 layers, 1e-5 for 24 and 1e-6 for more."""

    def parameter_count(self, d_model: int) -> int:
        """Return the width of γ."""
        return d_model


class BoundedGateSpec(ScalingSpec):
    """``stream + γ branch`` with ``γ = maximum · σ(raw)`` per channel and a learned raw value."""

    kind: Literal["bounded_gate"] = "bounded_gate"
    maximum: PositiveFloat = 1.0
    """Upper bound of gamma."""
    init: PositiveFloat = 0.5
    """Initial value of gamma, below `maximum`."""

    @model_validator(mode="after")
    def _init_is_below_the_bound(self) -> Self:
        if self.init >= self.maximum:
            message = (
                f"init must be below maximum, {self.maximum}, which the gate never reaches; got {self.init}; "
                f"choose for example {self.maximum / 2:g}"
            )
            raise field_error(message, "init", value=self.init)
        return self

    def parameter_count(self, d_model: int) -> int:
        """Return the width of the gate."""
        return d_model


class DeepNormSpec(ScalingSpec):
    """``α stream + branch`` with a constant α."""

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: PositiveFloat | None = None
    """Factor of the stream; null: ``(2 · n_layers)^(1/4)``, as for decoders."""

    def factor(self, n_layers: int) -> float:
        """Return α of a stack of this many layers."""
        return (2.0 * n_layers) ** 0.25 if self.alpha is None else self.alpha


if not TYPE_CHECKING:
    __getattr__ = names_of_components(
        __name__, register_components, Scaling="implicit_blocks.scalings.scaling"
    )
