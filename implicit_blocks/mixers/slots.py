"""States of rows that are each at a length of their own, as decoding many texts at once needs.

``SequenceState`` has one length for all its rows. Here a row is a *slot*: it takes a prompt, goes on token by
token, ends, and takes the next prompt, whatever the other slots do.

Shape legend: S slots, R of them in a step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Mixer, SlotStates, State


class RecurrentSlots(SlotStates):
    """Slots of a mixer whose state has one size, whatever the number of tokens, and knows no positions.

    Every tensor of its state must lead with the batch. A step of all slots reads the state where it lies; one
    of some of them works on a copy of theirs.
    """

    def __init__(self, mixer: Mixer, slots: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.mixer = mixer
        self.states = mixer.initial_state(slots, device=device, dtype=dtype)
        self._new = mixer.initial_state(1, device=device, dtype=dtype)

    def prefill(self, slot: int) -> State:
        """Return an empty state."""
        return self._new

    def commit(self, slot: int, state: State) -> None:
        """Copy the state into its slot."""
        for whole, row in self._pairs(state):
            whole[slot : slot + 1] = row

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> State:
        """Return the states, or a copy of these slots'."""
        return self.states if rows_R is None else self.mixer.select_rows(self.states, rows_R)

    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """Copy what was committed into its slots."""
        for whole, rows in self._pairs(after):
            mask = committed_R.view(-1, *[1] * (whole.ndim - 1))
            if rows_R is None:
                whole.copy_(torch.where(mask, rows.to(whole.dtype), whole))
            else:
                whole[rows_R] = torch.where(mask, rows.to(whole.dtype), whole[rows_R])

    def _pairs(self, state: State) -> zip[tuple[Tensor, Tensor]]:
        return zip(pytree.tree_leaves(self.states), pytree.tree_leaves(state), strict=True)
