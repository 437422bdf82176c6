"""Keys and values of rows that are each at a length of their own, in room that no text outgrows.

A lane has w − 1 slots, which its tokens take in turn: a new one takes the slot of the token that the next no
longer sees. Keys are stored rotated, so that the order of the slots says nothing.

Shape legend: S lanes, R of them in a step, K key and value heads, W = w − 1 slots, P head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import LaneStates
from implicit_blocks_sliding_window.state import SlidingWindowState


class LaneWindow(NamedTuple):
    """Keys and values in the slots of a step's lanes, (R, K, W, P), and the tokens each has had, (R,)."""

    keys_RKWP: Tensor
    values_RKWP: Tensor
    lengths_R: Tensor

    @property
    def seen_R1W(self) -> Tensor:
        """Which slots and which new token, the last, each lane's query sees, (R, 1, 1, W + 1) bool."""
        slots = self.keys_RKWP.shape[2]
        index = torch.arange(slots + 1, device=self.lengths_R.device)
        return ((index < self.lengths_R[:, None]) | (index == slots))[:, None, None]


class NewKeys(NamedTuple):
    """Key and value of the token that a step has mixed in each of its lanes, (R, K, 1, P)."""

    keys: Tensor
    values: Tensor


class SlidingWindowLanes(LaneStates):
    """The slots of all lanes, and which each takes next."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.next_S = torch.zeros(shape[0], device=device, dtype=torch.int64)

    def enter(self, lane: int) -> SlidingWindowState:
        """Return the state of no tokens."""
        none = self.keys[lane : lane + 1, :, :0]
        return SlidingWindowState(none, none)

    def settle(self, lane: int, state: SlidingWindowState) -> None:
        """Put the tokens that a prompt has left into slots, the oldest into the first."""
        kept = state.keys.shape[2]
        self.keys[lane, :, :kept], self.values[lane, :, :kept] = state.keys[0], state.values[0]
        self.next_S[lane] = kept % max(1, self.keys.shape[2])

    def at(self, rows_R: Tensor | None, lengths_R: Tensor) -> LaneWindow:
        """Return the slots of these lanes, or of all where they lie."""
        if rows_R is None:
            return LaneWindow(self.keys, self.values, lengths_R)
        return LaneWindow(self.keys[rows_R], self.values[rows_R], lengths_R)

    def write(self, rows_R: Tensor | None, after: NewKeys, committed_R: Tensor) -> None:
        """Put the new tokens into their slots, where they are committed; the host asks for no value."""
        slots = self.keys.shape[2]
        if slots == 0:  # a token sees itself alone
            return
        lanes = torch.arange(len(committed_R), device=committed_R.device) if rows_R is None else rows_R
        slot, taken = self.next_S[lanes], committed_R[:, None, None]
        for whole, new in ((self.keys, after.keys), (self.values, after.values)):
            whole[lanes, :, slot] = torch.where(taken, new[:, :, 0].to(whole.dtype), whole[lanes, :, slot])
        self.next_S[lanes] = torch.where(committed_R, (slot + 1) % slots, slot)
