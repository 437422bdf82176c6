"""When the search of one process among several ends.

Rows stop by their own residuals wherever nothing is communicated inside the loop; that is the default and
needs nothing of this. Where a layout gathers weights inside the loop, every process must call the map equally
often, or those that go on wait for ever for those that have stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Agreement = Callable[[bool], bool]
"""Asked once an iteration whether this process's rows are all done; answers whether the loop ends."""


def fixed_budget(done: bool) -> bool:
    """Never end the loop early: every process makes as many iterations as are allowed, and none asks."""
    return False


class RankAgreement:
    """End the loop when all processes are done.

    Rows that are done stand still while others go on: no value depends on another process, only the number
    of calls does.

    Args:
        group: the processes that gather weights together; None: all of them.

    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __call__(self, done: bool) -> bool:
        """Return whether all processes are done; every one of them must ask."""
        # On the host: the loop has read its own flag there already, and gloo keeps the GPU out of it.
        waiting = torch.tensor([0 if done else 1], dtype=torch.int32)
        dist.all_reduce(waiting, op=dist.ReduceOp.MAX, group=self.group)
        return not waiting.item()
