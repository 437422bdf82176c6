"""Keys and values of rows that are each at a length of their own.

Shape legend: S lanes, R of them in a step, H query heads, K key and value heads, C room for tokens, P head
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import State
from implicit_blocks.lanes import LaneStates


class LaneKeys(NamedTuple):
    """Keys and values of all lanes, (S, K, C, P); the lanes of a step, (R,), and the tokens each has, (R,).

    A step writes each lane's key and value behind its tokens, and attends where they lie: lanes are indexed,
    never copied. Committing the token is to count it.
    """

    keys_SKCP: Tensor
    values_SKCP: Tensor
    rows_R: Tensor | None
    lengths_R: Tensor


class AttentionLanes(LaneStates):
    """Room for ``capacity`` tokens in each of ``lanes`` lanes, reserved at once."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def enter(self, lane: int) -> State:
        """Return the lane's own part of the room, so that a prompt is written where it stays."""
        from implicit_blocks.mixers.attention import AttentionState

        return AttentionState(self.keys[lane : lane + 1], self.values[lane : lane + 1], 0)

    def settle(self, lane: int, state: State) -> None:
        """Copy the prompt to its lane, unless it was written there."""
        if state.keys.data_ptr() != self.keys[lane].data_ptr():
            self.keys[lane, :, : state.length] = state.keys[0, :, : state.length]
            self.values[lane, :, : state.length] = state.values[0, :, : state.length]

    def at(self, rows_R: Tensor | None, lengths_R: Tensor) -> LaneKeys:
        """Return the lanes, by their index."""
        return LaneKeys(self.keys, self.values, rows_R, lengths_R)

    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """There is nothing to do: what stands behind a lane's tokens is committed by counting it."""
