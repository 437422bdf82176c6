"""What a YAML file says of the mixer, and what the mixer costs. Imports no torch."""

from __future__ import annotations

from typing import Literal

from implicit_blocks.specs import MixerSpec, Parameters
from pydantic import PositiveInt


class TemplateSpec(MixerSpec):
    """A gated recurrence: each feature of a memory is kept or overwritten, token by token."""

    kind: Literal["template"] = "template"
    expand: PositiveInt = 1
    """Width of the memory as a multiple of the model's."""

    def injection_width(self, d_model: int) -> int:
        """Count new value, keep gate and output gate."""
        return 3 * self.expand * d_model

    def parameter_count(self, d_model: int) -> Parameters:
        """Count both projections and the bias of the keep gate."""
        width = self.expand * d_model
        return Parameters(4 * width * d_model + width, 3 * width + d_model)

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count both projections; the scan is element-wise."""
        return float(8 * self.expand * d_model * d_model)
