"""Policies of a search, which are passed to the loop: moving averages, look-ahead, prefix commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.specs import Stopping


@dataclass(frozen=True)
class MovingAverage:
    """Averages the points and their values, ``m ← (1 − α) m + α f(z)``, both begun with the first.

    Both are averaged, because the step of the average alone, ``α (f(z) − m)``, is smaller than the residual
    by the factor α and would be taken for convergence.

    Args:
        weight: α in (0, 1].

    """

    weight: float

    def update(self, averages: tuple[Tensor, Tensor] | None, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new averages of points and values; ``averages`` is None before the first call."""
        if averages is None:
            return z, fz
        return torch.lerp(averages[0], z, self.weight), torch.lerp(averages[1], fz, self.weight)


LookAhead = Callable[[Sequence[float], Stopping], bool]
"""Given the lowest deciding residual of each call so far, whether the next one is above the tolerance too.

Asked while all elements are active. A call that was launched early in vain is discarded.
"""


def expects_all_active(lowest: Sequence[float], stopping: Stopping) -> bool:
    """Whether all elements are expected to stay active, as residuals fall by a similar factor in each call.

    Before the first call, a relative residual of 1 is expected: ``f(z)`` is as far from ``z`` as from 0.
    """
    start = [5.0, 1.0] if stopping.norm == "relative" else []
    history = [*start, *lowest[-2:]]
    if len(history) < 2:
        return False
    before, last = history[-2:]
    return before > 0 and last * min(1.0, last / before) > 2 * stopping.tolerance


@dataclass(frozen=True)
class PrefixCommit:
    """Decides how many tokens are committed as state, with prefix scope.

    Args:
        multiple: commit at multiples of this number of tokens; choose the mixer's chunk size.

    """

    multiple: int

    def tokens(self, active: Tensor, remaining: int, read: Callable[[Tensor], Any]) -> int:
        """Return the number of tokens to commit now, or 0.

        A commit costs one call for those tokens, and new shapes for the rest: it must pay for at least an
        eighth of the tokens.

        Args:
            active: which tokens are active, (B, T, 1).
            remaining: the number of active tokens.
            read: copies a tensor to the host.

        """
        if 8 * remaining > 7 * active.numel():
            return 0
        behind = active.any(0).flatten().cummax(0).values  # active in some row, or after such a token
        (waiting,) = read(behind.sum(0, keepdim=True))
        tokens = active.shape[1]
        done: int = (tokens - waiting) // self.multiple * self.multiple
        return done if 8 * done >= tokens else 0
