"""What language models return.

Shape legend: B batch, L tokens, D model width, V vocabulary (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.solution import Solution


@dataclass(frozen=True)
class LMOutput:
    """Logits (B, L, V) in float32 or better, the loss if labels were given, the search, the state after.

    Where logits were not asked for they are None, and ``predictions`` (B, L) int64 has the likeliest tokens.
    """

    logits: Tensor | None
    loss: Tensor | None = None
    solution: Solution | None = None
    state: SequenceState | None = None
    predictions: Tensor | None = None

    def __repr__(self) -> str:
        """Say in a line what there is: shapes, the loss, how the search went."""
        parts = {
            "logits": None if self.logits is None else tuple(self.logits.shape),
            "loss": None if self.loss is None or self.loss.is_meta else f"{self.loss.item():.4f}",
            "solution": self.solution,
            "state": None if self.state is None else "…",
            "predictions": None if self.predictions is None else tuple(self.predictions.shape),
        }
        shown = (f"{name}={value}" for name, value in parts.items() if value is not None)
        return f"LMOutput({', '.join(shown)})"


@dataclass(frozen=True)
class Encoded:
    """What the head reads, (B, L, D); how the search went; the state after, where it was asked for."""

    hidden_BLD: Tensor
    solution: Solution | None = None
    state: SequenceState | None = None
