"""Injections: how the prelude's output enters the core. Their specs and registration are in this file.

Importing this package imports no torch; the classes are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.families import InjectionSpec, linear_shapes

if TYPE_CHECKING:
    from implicit_blocks.injections.additive import AddInjection as AddInjection
    from implicit_blocks.injections.additive import Attractor as Attractor
    from implicit_blocks.injections.additive import NoInjection as NoInjection
    from implicit_blocks.injections.additive import Residual as Residual
    from implicit_blocks.injections.base import Injection as Injection
    from implicit_blocks.injections.learned import Concat as Concat
    from implicit_blocks.injections.learned import Diagonal as Diagonal
    from implicit_blocks.injections.projection import Projection as Projection


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in injections."""
    add("injection", ProjectionSpec, "implicit_blocks.injections.projection:Projection")
    add("injection", NoInjectionSpec, "implicit_blocks.injections.additive:NoInjection")
    add("injection", AddInjectionSpec, "implicit_blocks.injections.additive:AddInjection")
    add("injection", ConcatSpec, "implicit_blocks.injections.learned:Concat")
    add("injection", DiagonalSpec, "implicit_blocks.injections.learned:Diagonal")
    add("injection", AttractorSpec, "implicit_blocks.injections.additive:Attractor")
    add("injection", ResidualSpec, "implicit_blocks.injections.additive:Residual")


class ProjectionSpec(InjectionSpec):
    """``u = W rms(e) + b`` is added to the input projection of every mixer: Schöne et al., ICML 2025."""

    z_init: ClassVar[str] = "zeros"
    core_norm: ClassVar[bool] = True
    adds_to_projections: ClassVar[bool] = True
    needs_equal_widths: ClassVar[bool] = False

    kind: Literal["projection"] = "projection"

    def parameter_shapes(
        self, d_model: int, core_width: int, projected: int | None
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the norm, the weight and the bias."""
        if projected is None:
            return None
        return {"norm.weight": (d_model,)} | linear_shapes("proj", projected, d_model, bias=True)

    def flops_per_token(
        self, d_model: int, core_width: int, projected: int | None
    ) -> tuple[float | None, float]:
        """Count one product per token, outside the loop."""
        return (None if projected is None else 2.0 * d_model * projected), 0.0


class NoInjectionSpec(InjectionSpec):
    """No injection: the core sees the prelude's output only as its start, as in Ouro (2510.25741)."""

    z_init: ClassVar[str] = "prelude"
    core_norm: ClassVar[bool] = True
    injects: ClassVar[bool] = False

    kind: Literal["none"] = "none"


class AddInjectionSpec(InjectionSpec):
    """The core reads ``z + e``."""

    z_init: ClassVar[str] = "prelude"

    kind: Literal["add"] = "add"


class ConcatSpec(InjectionSpec):
    """The core reads ``W [z; e]``, as in Huginn: Geiping et al., 2025 (2502.05171)."""

    z_init: ClassVar[str] = "normal"
    needs_equal_widths: ClassVar[bool] = False

    kind: Literal["concat"] = "concat"
    bias: bool = False
    """Whether the projection has a bias."""

    def parameter_shapes(
        self, d_model: int, core_width: int, projected: int | None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the projection."""
        return linear_shapes("proj", core_width, core_width + d_model, bias=self.bias)

    def flops_per_token(
        self, d_model: int, core_width: int, projected: int | None
    ) -> tuple[float | None, float]:
        """Count the product of each iteration."""
        return 0.0, 2.0 * core_width * (core_width + d_model)


class DiagonalSpec(InjectionSpec):
    """The core reads ``exp(−Δ·A) ⊙ z + Δ ⊙ B e``, which is stable in every channel: Parcae (2604.12946)."""

    z_init: ClassVar[str] = "zeros"
    needs_equal_widths: ClassVar[bool] = False

    kind: Literal["diagonal"] = "diagonal"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.4472135954999579
    """Initial factor of z in every channel; ``√(1/5)`` as published."""

    def parameter_shapes(
        self, d_model: int, core_width: int, projected: int | None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A, the bias of Δ and B."""
        channels = (core_width,)
        shapes: dict[str, tuple[int, ...]] = {"A_log": channels, "dt_bias": channels}
        return shapes | linear_shapes("proj", core_width, d_model, bias=False)

    def flops_per_token(
        self, d_model: int, core_width: int, projected: int | None
    ) -> tuple[float | None, float]:
        """Count the product with B, once per token."""
        return 2.0 * core_width * d_model, 0.0


class AttractorSpec(InjectionSpec):
    """``z ← core(z + e) − z``, as in Attractor (2605.12466)."""

    z_init: ClassVar[str] = "prelude"

    kind: Literal["attractor"] = "attractor"


class ResidualSpec(InjectionSpec):
    """``z ← e + Δ(z)`` with ``core(z) = z + Δ(z)``: the fixed point is ``z* = e + Δ(z*)``.

    One call from ``z = e`` is the explicit stack. With a gate g the core reads ``e + g ⊙ (z − e)``: at g = 0
    every number of calls gives the explicit stack, and training opens the gate.
    """

    z_init: ClassVar[str] = "prelude"

    kind: Literal["residual"] = "residual"
    gate_init: float | None = None
    """Initial value of a learned gate g per channel; null: no gate, g = 1."""
    damping: Annotated[float, Field(gt=0, le=1)] = 1.0
    """λ of the damped map ``z + λ (e + Δ(z) - z)``, which has the same fixed point: for loops that alternate
    between two values. The residual is that of this map, λ times the undamped one; one call from ``e`` gives
    ``e + λ Δ(e)``."""

    def parameter_shapes(
        self, d_model: int, core_width: int, projected: int | None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of the gate, where there is one."""
        return {} if self.gate_init is None else {"gate": (core_width,)}


if not TYPE_CHECKING:
    __getattr__ = names_of_components(
        __name__, register_components, Injection="implicit_blocks.injections.base"
    )
