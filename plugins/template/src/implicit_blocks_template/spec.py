"""The mixer's settings and costs. Imports no torch."""

from __future__ import annotations

from typing import Literal

from implicit_blocks.specs import MixerSpec
from pydantic import PositiveInt


class TemplateSpec(MixerSpec):
    """A gated recurrence that keeps or overwrites each feature of a memory at every token."""

    kind: Literal["template"] = "template"
    expand: PositiveInt = 1
    """Width of the memory as a multiple of the model's."""

    def injection_width(self, d_model: int) -> int:
        """Return the width of new value, keep gate and output gate."""
        return 3 * self.expand * d_model

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of both projections and of the keep gate's bias."""
        width = self.expand * d_model
        projections = {"in_proj.weight": (3 * width, d_model), "out_proj.weight": (d_model, width)}
        return {"keep_bias": (width,), **projections}

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count both projections; the scan is element-wise."""
        return float(8 * self.expand * d_model * d_model)
