"""Return values of generation: single steps and whole results.

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
    ``logits`` (B, V) are those that the token was chosen from, zeros in ended rows. ``iterations`` int64,
    ``residual`` and ``converged`` (B,) report the token's search (0, 0 and True in ended rows); they are None
    in explicit models.
    """

    tokens: Tensor
    active: Tensor
    logits: Tensor
    iterations: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None


@dataclass(frozen=True)
class CallStatistics:
    """How tokens were decoded: the cost of decoding at small batches is the number of ``calls``.

    ``calls`` counts the calls of the map, without those for prompts. ``tokens_in_flight`` is the mean number
    of tokens of a text that shared a call, and ``restarts`` counts the tokens that began anew, because the
    token itself changed, or because it missed the tolerance while its predecessors moved.
    """

    calls: int
    tokens_in_flight: float
    restarts: int


@dataclass(frozen=True)
class Generated:
    """Generated ``tokens`` (B, N) int64, without the prompts, with pad tokens after a row's end.

    ``lengths`` (B,) int64 counts a row's tokens, a stop token included; ``stopped`` (B,) bool is True where a
    stop token ended the row. ``logits`` (B, N, V), on request, are those that each token was chosen from.
    ``iterations`` int64, ``residual`` and ``converged``, (B, N), report the search of each token (0, 0 and
    True after a row's end), ``prompt`` that of the prompts, which are padded on the right; they are None in
    explicit models. ``statistics`` counts the calls of the map.
    """

    tokens: Tensor
    lengths: Tensor
    stopped: Tensor
    logits: Tensor | None = None
    iterations: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None
    prompt: Solution | None = None
    statistics: CallStatistics | None = None
