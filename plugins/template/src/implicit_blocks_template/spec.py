"""What a YAML file says of the mixer, and what the mixer costs. Imports no torch."""

from __future__ import annotations

from typing import Literal

from implicit_blocks.specs import MixerSpec
from pydantic import PositiveInt


class TemplateSpec(MixerSpec):
    """A gated recurrence: each feature of a memory is kept or overwritten, token by token."""

    kind: Literal["template"] = "template"
    expand: PositiveInt = 1
    """Width of the memory as a multiple of the model's."""

    def injection_width(self, d_model: int) -> int:
        """Count new value, keep gate and output gate."""
        return 3 * self.expand * d_model

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """List the bias of the keep gate and both projections, by their names in the mixer."""
        width = self.expand * d_model
        projections = {"in_proj.weight": (3 * width, d_model), "out_proj.weight": (d_model, width)}
        return {"keep_bias": (width,), **projections}

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count both projections; the scan is element-wise."""
        return float(8 * self.expand * d_model * d_model)
