"""The state of Mamba2, of a batch and in slots.

Shape legend: S slots, R of them in a step, W convolution taps, C convolved channels, H heads, P head width, N
state width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Mixer, SlotStates

if TYPE_CHECKING:
    from implicit_blocks.mixers.mamba2.mixer import Mamba2


class Mamba2State(NamedTuple):
    """The state after committed tokens: the convolution's last inputs, (B, W − 1, C), and h, (B, H, P, N).

    ``h`` is in float32 or better.
    """

    conv_BWC: Tensor
    h_BHPN: Tensor


class Mamba2Prefix(Mamba2State):
    """The state after the first tokens of a window, whose number differs between rows."""


class Mamba2Slots(SlotStates):
    """The convolution's last inputs, ``taps_SWC``, and the scan's ``h_SHPN`` of every slot.

    The inputs form a ring of W entries; ``next_S`` is the next one to write. A step writes the input of its
    own token there, after the W − 1 preceding ones, and nothing reads it until the token is committed.
    """

    def __init__(self, mixer: Mamba2, slots: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._new = mixer.initial_state(1, device=device, dtype=dtype)
        taps, channels = mixer.spec.d_conv, mixer.conv_width
        self.taps_SWC = torch.zeros(slots, taps, channels, device=device, dtype=dtype)
        shape = (slots, *self._new.h_BHPN.shape[1:])
        self.h_SHPN = torch.zeros(shape, device=device, dtype=self._new.h_BHPN.dtype)
        self.next_S = torch.zeros(slots, device=device, dtype=torch.int64)
        self._order = torch.arange(1, taps, device=device)
        self._slots = torch.arange(slots, device=device)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Store ``h`` in this floating dtype; with integers every token would round it to 8 bits again."""
        super().set_dtype(dtype)
        self.h_SHPN = self.h_SHPN.to(dtype)

    @property
    def windows(self) -> bool:
        """Whether states have their default dtype; narrower ones are rounded at every token."""
        return self.h_SHPN.dtype == self._new.h_BHPN.dtype

    def prefill(self, slot: int) -> Mamba2State:
        """Return an empty state."""
        return self._new

    def commit_rows(self, mixer: Mixer, slots: Sequence[int], slots_B: Tensor, state: Mamba2State) -> None:
        """Copy the states into their slots."""
        self.taps_SWC[slots_B, 1:] = state.conv_BWC.to(self.taps_SWC.dtype)
        self.h_SHPN[slots_B] = state.h_BHPN.to(self.h_SHPN.dtype)
        self.next_S.index_fill_(0, slots_B, 0)

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> Mamba2State:
        """Return the states: a view for all slots, a copy for some."""
        rows = self._slots if rows_R is None else rows_R
        entries = (self.next_S[rows, None] + self._order) % self.taps_SWC.shape[1]
        h = self.h_SHPN if rows_R is None else self.h_SHPN[rows_R]
        return Mamba2State(self.taps_SWC[rows[:, None], entries], h)

    def write(self, rows_R: Tensor | None, after: Mamba2State, committed_R: Tensor) -> None:
        """Copy committed states into their slots; the other slots may get an input that is never read.

        The state after several tokens of a window comes with all inputs of the convolution that it reads.
        """
        rows = self._slots if rows_R is None else rows_R
        taps, entries = self.taps_SWC.shape[1], self.next_S[rows]
        if isinstance(after, Mamba2Prefix):
            ring = (entries[:, None] + self._order) % taps
            kept = self.taps_SWC[rows[:, None], ring]
            new = torch.where(committed_R[:, None, None], after.conv_BWC.to(kept.dtype), kept)
            self.taps_SWC[rows[:, None], ring] = new
        elif taps > 1:
            self.taps_SWC[rows, entries] = after.conv_BWC[:, -1].to(self.taps_SWC.dtype)
            self.next_S[rows] = (entries + committed_R) % taps
        kept = self.h_SHPN if rows_R is None else self.h_SHPN[rows_R]
        h = torch.where(committed_R[:, None, None, None], after.h_BHPN.to(kept.dtype), kept)
        if rows_R is None:
            self.h_SHPN.copy_(h)
        else:
            self.h_SHPN[rows_R] = h
