"""The part of every training sequence that this rank has, where ranks divide sequences.

Shape legend: B sequences, L tokens of a sequence, P of them of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from implicit_blocks.models.parts import ModelParts
from implicit_blocks.parallel.sequence import SequencePart
from implicit_blocks.search.agreement import DividedRows
from trainer.data.source import Batch
from trainer.distributed.grid import Grid


@dataclass(frozen=True)
class SequenceShares:
    """Cuts batches of whole sequences to this rank's tokens.

    Labels are aligned with the inputs in a batch, so that those at the border need no exchange.
    """

    part: SequencePart
    model: ModelParts

    @classmethod
    def of(cls, grid: Grid, model: Any) -> SequenceShares | None:
        """Return the shares of a grid; None where each rank has whole sequences."""
        if grid.context is None:
            return None
        return cls(SequencePart(grid.context, DividedRows(tokens=grid.context, heads=grid.tensor)), model)

    def own(self, batch: Batch) -> Batch:
        """Return this rank's tokens (B, P) of a batch."""
        count = batch.inputs.shape[1] // self.part.parts
        first = self.part.index * count
        documents = batch.documents
        own = batch.each(lambda of_all: of_all[:, first : first + count])
        earlier = None if documents is None else documents[:, :first]
        return _PartBatch(**vars(own), shares=self, first=first, earlier=earlier)

    def last_tokens(self, count: int, length: int) -> int:
        """Return how many of the last ``count`` of ``length`` tokens this rank has: its last ones."""
        own = length // self.part.parts
        after = own * (self.part.parts - 1 - self.part.index)
        return min(max(0, count - after), own)


@dataclass(frozen=True, kw_only=True)
class _PartBatch(Batch):
    """Tokens from number ``first`` on of every sequence; ``earlier`` are the documents before, (B, first)."""

    shares: SequenceShares
    first: int
    earlier: Tensor | None

    def context(self) -> dict[str, Any]:
        """Return the keyword arguments of ``forward``, among them the place of the tokens."""
        before = self.shares.model.initial_state(len(self))
        state = replace(
            before,
            length=self.first,
            next_position=before.next_position + self.first,
            documents_BT=self.earlier,
            part=self.shares.part,
        )
        return {**super().context(), "state": state}

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor changed in the same way."""
        own = super().each(change)
        return _PartBatch(**{**vars(own), "earlier": None if self.earlier is None else change(self.earlier)})
