"""Slot states of mixers with recurrent states, for continuous decoding.

``SequenceState`` has one length for all its rows. *Slots* have independent lengths: each receives a prompt,
continues token by token, ends, and receives the next prompt, independently of the other slots.

Shape legend: S slots, R of them in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Mixer, SlotStates, State


class RecurrentSlots(SlotStates):
    """Slots of a mixer whose state has a fixed size and does not depend on positions.

    The first dimension of every tensor of its state must be the batch. A step of all slots reads the states
    in place; a step of some slots copies theirs.
    """

    def __init__(self, mixer: Mixer, slots: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.mixer = mixer
        self.states = mixer.initial_state(slots, device=device, dtype=dtype)
        self._new = mixer.initial_state(1, device=device, dtype=dtype)

    @property
    def windows(self) -> bool:
        """True: the state is that of any window of the mixer."""
        return True

    def prefill(self, slot: int) -> State:
        """Return an empty state."""
        return self._new

    def commit_rows(self, mixer: Mixer, slots: Sequence[int], slots_B: Tensor, state: State) -> None:
        """Copy the states into their slots."""
        for whole, rows in self._pairs(state):
            whole[slots_B] = rows.to(whole.dtype)

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> State:
        """Return the states of all slots, or a copy of those of ``rows_R``."""
        return self.states if rows_R is None else self.mixer.select_rows(self.states, rows_R)

    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """Copy committed states into their slots."""
        for whole, rows in self._pairs(after):
            mask = committed_R.view(-1, *[1] * (whole.ndim - 1))
            if rows_R is None:
                whole.copy_(torch.where(mask, rows.to(whole.dtype), whole))
            else:
                whole[rows_R] = torch.where(mask, rows.to(whole.dtype), whole[rows_R])

    def _pairs(self, state: State) -> zip[tuple[Tensor, Tensor]]:
        return zip(pytree.tree_leaves(self.states), pytree.tree_leaves(state), strict=True)
