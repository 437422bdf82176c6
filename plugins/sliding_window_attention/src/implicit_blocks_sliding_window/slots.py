"""Keys and values of rows that are each at a length of their own, in room that no text outgrows.

A slot has w − 1 entries, which its tokens take in turn: a new one takes the entry of the token that the next
no longer sees. Keys are stored rotated, so that the order of the entries says nothing.

Shape legend: S slots, R of them in a step, K key and value heads, W = w − 1 entries, P head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import SlotStates
from implicit_blocks_sliding_window.state import SlidingWindowState


class SlotWindow(NamedTuple):
    """Keys and values in the entries of a step's slots, (R, K, W, P), and the tokens each has had, (R,)."""

    keys_RKWP: Tensor
    values_RKWP: Tensor
    lengths_R: Tensor

    @property
    def seen_R1W(self) -> Tensor:
        """Which entries and which new token, the last, each slot's query sees, (R, 1, 1, W + 1) bool."""
        entries = self.keys_RKWP.shape[2]
        index = torch.arange(entries + 1, device=self.lengths_R.device)
        return ((index < self.lengths_R[:, None]) | (index == entries))[:, None, None]


class NewKeys(NamedTuple):
    """Key and value of the token that a step has mixed in each of its slots, (R, K, 1, P)."""

    keys: Tensor
    values: Tensor


class SlidingWindowSlots(SlotStates):
    """The entries of all slots, and which each takes next."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.next_S = torch.zeros(shape[0], device=device, dtype=torch.int64)

    def prefill(self, slot: int) -> SlidingWindowState:
        """Return the state of no tokens."""
        none = self.keys[slot : slot + 1, :, :0]
        return SlidingWindowState(none, none)

    def commit(self, slot: int, state: SlidingWindowState) -> None:
        """Put the tokens that a prompt has left into entries, the oldest into the first."""
        kept = state.keys.shape[2]
        self.keys[slot, :, :kept], self.values[slot, :, :kept] = state.keys[0], state.values[0]
        self.next_S[slot] = kept % max(1, self.keys.shape[2])

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> SlotWindow:
        """Return the entries of these slots, or of all where they lie."""
        if rows_R is None:
            return SlotWindow(self.keys, self.values, lengths_R)
        return SlotWindow(self.keys[rows_R], self.values[rows_R], lengths_R)

    def write(self, rows_R: Tensor | None, after: NewKeys, committed_R: Tensor) -> None:
        """Put the new tokens into their entries, where they are committed; the host asks for no value."""
        entries = self.keys.shape[2]
        if entries == 0:  # a token sees itself alone
            return
        slots = torch.arange(len(committed_R), device=committed_R.device) if rows_R is None else rows_R
        entry, taken = self.next_S[slots], committed_R[:, None, None]
        for whole, new in ((self.keys, after.keys), (self.values, after.values)):
            whole[slots, :, entry] = torch.where(taken, new[:, :, 0].to(whole.dtype), whole[slots, :, entry])
        self.next_S[slots] = torch.where(committed_R, (entry + 1) % entries, entry)
