"""MLPs: components that process each token separately. Their specs and their registration are in this file.

Importing this package imports no torch; the classes are imported on first use.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.families import MLPSpec, hidden_plan, linear_shapes
from implicit_blocks.specs.tensor_plan import TensorPlan

Activation = Literal["relu", "relu2", "half_relu2", "gelu", "gelu_tanh", "silu"]


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in MLPs."""
    add("mlp", SwiGLUSpec, "implicit_blocks.layers:SwiGLU")
    add("mlp", FeedForwardSpec, "implicit_blocks.mlps.feed_forward:FeedForward")


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


class FeedForwardSpec(MLPSpec):
    """``W_out act(W_in z)``, or gated ``W_out (act(W_gate z) · W_up z)``."""

    kind: Literal["mlp"] = "mlp"
    d_ff: PositiveInt
    """Hidden width."""
    activation: Activation = "gelu"
    """`relu2` is ``relu(x)²``, `half_relu2` its half, `gelu_tanh` the tanh approximation of `gelu`."""
    gated: bool = False
    """Whether the activation gates a second projection; with `silu` this equals kind `swiglu`."""
    bias: bool = False
    """Whether the layers have biases."""

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the two projections, or of the three of a gated MLP."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("gate_proj", "up_proj") if self.gated else ("in_proj",):
            shapes |= linear_shapes(name, self.d_ff, d_model, bias=self.bias)
        return shapes | linear_shapes("out_proj", d_model, self.d_ff, bias=self.bias)

    def tensor_plan(self, d_model: int) -> TensorPlan:
        """Divide the hidden channels."""
        inputs = ("gate_proj", "up_proj") if self.gated else ("in_proj",)
        return hidden_plan(inputs, "out_proj", self.d_ff, bias=self.bias)

    def headline(self, d_model: int) -> str:
        """Return hidden width and activation."""
        return f"hidden width {self.d_ff}, {'gated ' if self.gated else ''}{self.activation}"

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count two matrix products, or three."""
        return float((6 if self.gated else 4) * d_model * self.d_ff)
