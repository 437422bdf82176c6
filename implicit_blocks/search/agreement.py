"""Agreement: when the search of one process among several ends.

By default each process stops when its own rows are done. If a distributed layout gathers weights inside the
loop, every process must call the map equally often: otherwise those that continue wait forever for those that
have stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Agreement = Callable[[bool], bool]
"""Called once per iteration with whether this process's rows are all done; returns whether the loop ends."""


def fixed_budget(done: bool) -> bool:
    """Never end the loop early: every process runs ``max_iterations``, without communication."""
    return False


class RankAgreement:
    """End the loop when all processes are done.

    Rows that are done stay frozen while others continue: only the number of calls depends on other processes,
    no value does.

    Args:
        group: the processes that gather weights together; None: all of them.

    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __call__(self, done: bool) -> bool:
        """Return whether all processes are done; all of them must call this."""
        # On the host: the loop has read its own flag there already, and gloo does not involve the GPU.
        waiting = torch.tensor([0 if done else 1], dtype=torch.int32)
        dist.all_reduce(waiting, op=dist.ReduceOp.MAX, group=self.group)
        return not waiting.item()
