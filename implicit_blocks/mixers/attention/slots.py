"""Keys and values of rows that are each at a length of their own.

Shape legend: S lanes, R of them in a step, H query heads, K key and value heads, C room for tokens, P head
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import LaneStates, State
from implicit_blocks.ops.quantization import eight_bits


class LaneKeys(NamedTuple):
    """Keys and values of all lanes, (S, K, C, P); the lanes of a step, (R,), and the tokens each has, (R,).

    A step writes each lane's key and value behind its tokens, and attends where they lie: lanes are indexed,
    never copied. Committing the token is to count it. Those of 8 bits have scales, (S, K, C).
    """

    keys_SKCP: Tensor
    values_SKCP: Tensor
    rows_R: Tensor | None
    lengths_R: Tensor
    key_scales_SKC: Tensor | None = None
    value_scales_SKC: Tensor | None = None

    def put(self, keys_RKP: Tensor, values_RKP: Tensor) -> None:
        """Write the key and value of a token behind those of each lane."""
        lanes = self.rows_R
        if lanes is None:
            lanes = torch.arange(len(keys_RKP), device=keys_RKP.device)
        written = (
            (keys_RKP, self.keys_SKCP, self.key_scales_SKC),
            (values_RKP, self.values_SKCP, self.value_scales_SKC),
        )
        for new, kept, scales in written:
            if scales is not None:
                new, scales[lanes, :, self.lengths_R] = eight_bits(new)
            kept[lanes, :, self.lengths_R] = new


class AttentionLanes(LaneStates):
    """Room for ``capacity`` tokens in each of ``lanes`` lanes, reserved at once."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self._wide = dtype
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep keys and values in 8 bits, with a scale of each head and token, if that is asked for.

        Floating types are the scans' affair: keys and values are in that of the computation.

        Raises:
            ValueError: for integers of other sizes.

        """
        if dtype.is_floating_point:
            return
        if dtype != torch.int8:
            raise ValueError(f"keys and values can't be kept in {dtype}; choose torch.int8")
        self.keys, self.values = (torch.zeros_like(kept, dtype=dtype) for kept in (self.keys, self.values))
        scales = torch.zeros(2, *self.keys.shape[:-1], device=self.keys.device)
        self.key_scales, self.value_scales = scales.unbind()

    def enter(self, lane: int) -> State:
        """Return the lane's own part of the room, so that a prompt is written where it stays.

        For 8 bits an empty state: a prompt is solved with its keys as they are, which are rounded once.
        """
        from implicit_blocks.mixers.attention.mixer import AttentionState

        if self.key_scales is not None:
            nothing = self.keys[lane : lane + 1, :, :0].to(self._wide)
            return AttentionState(nothing, nothing, 0)
        return AttentionState(self.keys[lane : lane + 1], self.values[lane : lane + 1], 0)

    def settle(self, lane: int, state: State) -> None:
        """Copy the prompt to its lane, unless it was written there.

        What an earlier text has left behind it is wiped out: attention to masked keys multiplies them by 0,
        and what overflowed would be NaN in this text too.
        """
        for kept in (self.keys, self.values, self.key_scales, self.value_scales):
            if kept is not None:
                kept[lane, :, state.length :] = 0
        new = (state.keys[0, :, : state.length], state.values[0, :, : state.length])
        if self.key_scales is not None and self.value_scales is not None:
            keys, values = eight_bits(new[0]), eight_bits(new[1])
            self.key_scales[lane, :, : state.length] = keys.scales
            self.value_scales[lane, :, : state.length] = values.scales
            new = (keys.codes, values.codes)
        elif state.keys.data_ptr() == self.keys[lane].data_ptr():
            return
        self.keys[lane, :, : state.length], self.values[lane, :, : state.length] = new

    def at(self, rows_R: Tensor | None, lengths_R: Tensor) -> LaneKeys:
        """Return the lanes, by their index."""
        return LaneKeys(self.keys, self.values, rows_R, lengths_R, self.key_scales, self.value_scales)

    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """There is nothing to do: what stands behind a lane's tokens is committed by counting it."""
