"""Return values of language models.

Shape legend: B batch, L tokens, D model width, V vocabulary (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.solution import Solution


@dataclass(frozen=True)
class LMOutput:
    """Logits (B, L, V) in float32 or better, the loss given labels, the solution and the state.

    With ``return_logits=False`` the logits are None, and ``predictions`` (B, L) int64 holds the most likely
    tokens.
    """

    logits: Tensor | None
    loss: Tensor | None = None
    solution: Solution | None = None
    state: SequenceState | None = None
    predictions: Tensor | None = None

    def __repr__(self) -> str:
        """Return one line with the shapes, the loss and the outcome of the search."""
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
    """The input of the head, (B, L, D), the solution, and on request the state after the tokens."""

    hidden_BLD: Tensor
    solution: Solution | None = None
    state: SequenceState | None = None
