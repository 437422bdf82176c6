"""Keys and values of slots with different lengths, in a buffer of constant size.

A slot has w − 1 entries, used cyclically: a new token replaces the one that the next token no longer attends
to. Keys are stored rotated, so the order of the entries is irrelevant.

Shape legend: S slots, R of them in a step, K key and value heads, W = w − 1 entries, P head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import SlotStates
from implicit_blocks_sliding_window.state import SlidingWindowState


class SlotWindow(NamedTuple):
    """Keys and values of a step's slots, (R, K, W, P), and the number of tokens of each slot, (R,)."""

    keys_RKWP: Tensor
    values_RKWP: Tensor
    lengths_R: Tensor

    @property
    def seen_R1W(self) -> Tensor:
        """The valid entries of each slot and, last, the new token, (R, 1, 1, W + 1) bool."""
        entries = self.keys_RKWP.shape[2]
        index = torch.arange(entries + 1, device=self.lengths_R.device)
        return ((index < self.lengths_R[:, None]) | (index == entries))[:, None, None]


class NewKeys(NamedTuple):
    """Key and value of the token mixed in each slot of a step, (R, K, 1, P)."""

    keys: Tensor
    values: Tensor


class SlidingWindowSlots(SlotStates):
    """The entries of all slots, and the next entry of each."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.next_S = torch.zeros(shape[0], device=device, dtype=torch.int64)

    def prefill(self, slot: int) -> SlidingWindowState:
        """Return an empty state."""
        none = self.keys[slot : slot + 1, :, :0]
        return SlidingWindowState(none, none)

    def commit(self, slot: int, state: SlidingWindowState) -> None:
        """Store the state after a prompt, the oldest token in the first entry."""
        kept = state.keys.shape[2]
        self.keys[slot, :, :kept], self.values[slot, :, :kept] = state.keys[0], state.values[0]
        self.next_S[slot] = kept % max(1, self.keys.shape[2])

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> SlotWindow:
        """Return the entries of these slots, or of all slots without a copy."""
        if rows_R is None:
            return SlotWindow(self.keys, self.values, lengths_R)
        return SlotWindow(self.keys[rows_R], self.values[rows_R], lengths_R)

    def write(self, rows_R: Tensor | None, after: NewKeys, committed_R: Tensor) -> None:
        """Store the committed new tokens, without synchronizing with the host."""
        entries = self.keys.shape[2]
        if entries == 0:  # a token attends only to itself
            return
        slots = torch.arange(len(committed_R), device=committed_R.device) if rows_R is None else rows_R
        entry, taken = self.next_S[slots], committed_R[:, None, None]
        for whole, new in ((self.keys, after.keys), (self.values, after.values)):
            whole[slots, :, entry] = torch.where(taken, new[:, :, 0].to(whole.dtype), whole[slots, :, entry])
        self.next_S[slots] = torch.where(committed_R, (entry + 1) % entries, entry)
