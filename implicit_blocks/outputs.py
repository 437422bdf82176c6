"""What language models return.

Shape legend: B batch, L tokens, D model width, V vocabulary (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from implicit_blocks.committed import Committed
from implicit_blocks.interfaces import Solution


@dataclass(frozen=True)
class LMOutput:
    """Logits (B, L, V) in float32 or better, the loss if labels were given, the search, the state after.

    Where logits were not asked for they are None, and ``predictions`` (B, L) int64 has the likeliest tokens.
    """

    logits: Tensor | None
    loss: Tensor | None = None
    solution: Solution | None = None
    state: Committed | None = None
    predictions: Tensor | None = None


@dataclass(frozen=True)
class Encoded:
    """What the head reads, (B, L, D); how the search went; the state after, where it was asked for."""

    hidden_BLD: Tensor
    solution: Solution | None = None
    state: Committed | None = None
