"""The ranks of a run by what they share: sequences, parts of sequences, heads.

World rank ``(b · C + c) · T + t`` has the sequences of batch share b, the tokens of part c of C, and the
heads of part t of T: ranks that communicate most are next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch.distributed as dist

from trainer.distributed.ranks import Ranks, keep_group


@dataclass(frozen=True)
class Grid:
    """The groups of ranks that a rank belongs to.

    ``data`` are the ranks that have other tokens and the same heads: gradients are averaged over them.
    ``batches`` are those of them that have other sequences. ``tensor`` are the ranks that have other heads of
    the same tokens, and ``context`` those that have other tokens of the same sequences; None: no others.
    """

    ranks: Ranks
    data: Ranks
    batches: Ranks
    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    parts: int = 1
    """Number of ranks that divide sequences."""

    @classmethod
    def undivided(cls, ranks: Ranks) -> Self:
        """Return the grid of ranks that all have other sequences and whole models."""
        return cls(ranks, ranks, ranks)

    @classmethod
    def of(cls, ranks: Ranks, *, tensor: int, context: int) -> Self:
        """Return the grid of ranks of which ``tensor`` divide heads and ``context`` divide sequences.

        All ranks call this together; ``tensor · context`` divides their number.
        """
        if tensor == context == 1:
            return cls.undivided(ranks)
        world = range(ranks.world_size)
        block = tensor * context
        part, batch = ranks.rank // tensor % context, ranks.rank // block
        data = _group([[r for r in world if r % tensor == t] for t in range(tensor)])
        batches = _group([[r for r in world if r % block == b] for b in range(block)])
        heads = _group([list(world[r : r + tensor]) for r in world[::tensor]])
        tokens = _group(
            [[r for r in world if (r // block, r % tensor) == (b, t)] for b in world for t in range(tensor)]
        )
        count = ranks.world_size // block
        return cls(
            ranks,
            replace(ranks, rank=batch * context + part, world_size=count * context, group=data),
            replace(ranks, rank=batch, world_size=count, group=batches),
            heads if tensor > 1 else None,
            tokens if context > 1 else None,
            context,
        )

    @property
    def tensor_rank(self) -> int:
        """The number of this rank among those that divide heads."""
        return 0 if self.tensor is None else self.tensor.rank()


def _group(members: list[list[int]]) -> dist.ProcessGroup:
    """Create the groups with these world ranks; return the one of this rank."""
    own: dist.ProcessGroup | None
    own, every = dist.new_subgroups_by_enumeration([ranks for ranks in members if ranks])
    assert own is not None  # every rank is in one of them
    for group in every:
        keep_group(group)
    return own
