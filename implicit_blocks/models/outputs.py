"""Return values of language models.

Shape legend: B batch, L tokens, D model width, C core width, V vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.solution import Solution
from implicit_blocks.windows import SequenceState


class Iterate(NamedTuple):
    """An iterate of the core, (B, L, C), and the head's input that it leads to, (B, L, D)."""

    z_BLC: Tensor
    hidden_BLD: Tensor


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
    trajectory: dict[int, Iterate] = field(default_factory=dict)
    """The chosen iterates by their number of loops; ``model.predict`` of their hidden states gives logits."""

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
    """The input of the head, (B, L, D), the solution, and on request the state after the tokens.

    ``iterates`` has the chosen iterates of the core by their number of loops.
    """

    hidden_BLD: Tensor
    solution: Solution | None = None
    state: SequenceState | None = None
    iterates: dict[int, Iterate] = field(default_factory=dict)

    @classmethod
    def concatenate(cls, parts: Sequence[Encoded]) -> Encoded:
        """Return consecutive windows as one, without a state; iterates that a window lacks are left out."""
        solutions = [part.solution for part in parts if part.solution is not None]
        common = [t for t in parts[0].iterates if all(t in part.iterates for part in parts)]
        return cls(
            torch.cat([part.hidden_BLD for part in parts], dim=1),
            Solution.concatenate(solutions) if solutions else None,
            iterates={
                t: Iterate(
                    torch.cat([part.iterates[t].z_BLC for part in parts], dim=1),
                    torch.cat([part.iterates[t].hidden_BLD for part in parts], dim=1),
                )
                for t in common
            },
        )
