"""Prefix commit: the first tokens of a search, once done in every row, leave its working set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
