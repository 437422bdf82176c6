"""Agreement: when the search of one process among several ends.

By default each process stops when its own rows are done. If a distributed layout gathers weights inside the
loop, every process must call the map equally often: otherwise those that continue wait forever for those that
have stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Agreement = Callable[[bool], bool]
"""Called once per iteration with whether this process's rows are all done; returns whether the loop ends."""


def fixed_budget(done: bool) -> bool:
    """Never end the loop early: every process runs ``max_iterations``, without communication."""
    return False


def all_ranks_done(done: bool) -> bool:
    """Return whether all processes are done; all of them must call this.

    Rows that are done stay frozen while others continue: only the number of calls depends on other processes,
    no value does.
    """
    # On the host: the loop has read its own flag there already, and gloo does not involve the GPU.
    waiting = torch.tensor([0 if done else 1], dtype=torch.int32)
    dist.all_reduce(waiting, op=dist.ReduceOp.MAX)
    return not waiting.item()


class DividedRows:
    """The agreement of processes that compute the same rows together, each a part of every row.

    They make the same decisions because they measure the same norms: those of whole rows, equal to the last
    bit. Their loops end together without asking.

    Args:
        tokens: the processes that have other tokens of the same rows; None: this one has all tokens.
        heads: the processes that have other heads and channels, and copies of the points; None: no others.

    """

    def __init__(
        self, *, tokens: dist.ProcessGroup | None = None, heads: dist.ProcessGroup | None = None
    ) -> None:
        self.tokens, self.heads = tokens, heads

    def __call__(self, done: bool) -> bool:
        """Return whether the rows are done, on which all processes agree already."""
        return done

    def norms(self, own: Tensor) -> Tensor:
        """Return norms of rows of this and the other processes' tokens, given those of this one's, (…)."""
        if self.tokens is not None:
            squares = own.square()
            dist.all_reduce(squares, group=self.tokens)
            own = squares.sqrt()
        if self.heads is not None:
            # Copies of one number, unless a kernel has no fixed order of summation; all get the same mean.
            own = own.clone()
            dist.all_reduce(own, group=self.heads)
            own = own / self.heads.size()
        return own
