"""What generation returns, token by token and as a whole.

Shape legend: B batch, N new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from implicit_blocks.solution import Solution


@dataclass(frozen=True)
class Step:
    """A new token of every row, as ``stream`` yields it.

    ``tokens`` (B,) int64 has the pad token where ``active`` (B,) bool is False: in rows that have ended.
    ``logits`` (B, V) are those that the token was chosen from, zeros in such rows. ``iterations`` int64,
    ``residual`` and ``converged`` (B,) say how the search behind them went (0, 0 and True in such rows);
    they are None in explicit models, which search for nothing.
    """

    tokens: Tensor
    active: Tensor
    logits: Tensor
    iterations: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None


@dataclass(frozen=True)
class Generated:
    """What was generated: ``tokens`` (B, N) int64, the prompts left out, pad tokens behind a row's end.

    ``lengths`` (B,) int64 counts a row's tokens, a stop token included; ``stopped`` (B,) bool says that it
    ended by one. ``logits`` (B, N, V), where asked for, are those that each token was chosen from.
    ``iterations`` int64, ``residual`` and ``converged``, (B, N), say how the search behind each token went
    (0, 0 and True behind a row's end), and ``prompt`` how that of the prompts did; None in explicit models.
    """

    tokens: Tensor
    lengths: Tensor
    stopped: Tensor
    logits: Tensor | None = None
    iterations: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None
    prompt: Solution | None = None
