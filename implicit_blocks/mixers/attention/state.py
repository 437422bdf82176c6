"""The keys and values of attention, of a batch and in slots.

Shape legend: S slots, R of them in a step, H query heads, K key and value heads, C room for tokens, P head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Mixer, SlotStates, State
from implicit_blocks.ops.quantization import eight_bits


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the committed tokens, (B, K, C, P), of which the first ``length`` count.

    C is ``length``, or the room reserved for inference: a window then writes after the committed tokens, and
    committing it increases ``length``.
    """

    keys: Tensor
    values: Tensor
    length: int

    def with_room(self, tokens: int, *, dtype: torch.dtype | None = None) -> AttentionState:
        """Return a copy with room for this many tokens, at least the committed ones."""

        def copied(kept: Tensor) -> Tensor:
            shape = (*kept.shape[:2], tokens, kept.shape[3])
            room = torch.empty(shape, dtype=kept.dtype if dtype is None else dtype, device=kept.device)
            room[:, :, : self.length] = kept[:, :, : self.length]
            return room

        return AttentionState(copied(self.keys), copied(self.values), self.length)


class SlotKeys(NamedTuple):
    """Keys and values of all slots, (S, K, C, P); the slots of a step, (R,), and the tokens each has, (R,).

    A step writes each slot's keys and values after its tokens and attends in place: slots are indexed, never
    copied. Tokens are committed by increasing the slot's length. 8-bit keys and values have scales,
    (S, K, C).
    """

    keys_SKCP: Tensor
    values_SKCP: Tensor
    rows_R: Tensor | None
    lengths_R: Tensor
    key_scales_SKC: Tensor | None = None
    value_scales_SKC: Tensor | None = None

    def put(self, keys_RKP: Tensor, values_RKP: Tensor) -> None:
        """Write the key and value of one token after those of each slot."""
        slots = self._slots(keys_RKP)
        written = (
            (keys_RKP, self.keys_SKCP, self.key_scales_SKC),
            (values_RKP, self.values_SKCP, self.value_scales_SKC),
        )
        for new, kept, scales in written:
            if scales is not None:
                new, scales[slots, :, self.lengths_R] = eight_bits(new)
            kept[slots, :, self.lengths_R] = new

    def put_window(self, keys_RKLP: Tensor, values_RKLP: Tensor) -> None:
        """Write the keys and values of a window's tokens after those of each slot."""
        slots = self._slots(keys_RKLP)[:, None]
        places = self.lengths_R[:, None] + torch.arange(keys_RKLP.shape[2], device=keys_RKLP.device)
        self.keys_SKCP[slots, :, places] = keys_RKLP.transpose(1, 2).to(self.keys_SKCP.dtype)
        self.values_SKCP[slots, :, places] = values_RKLP.transpose(1, 2).to(self.values_SKCP.dtype)

    def _slots(self, like_R: Tensor) -> Tensor:
        rows = self.rows_R
        return torch.arange(len(like_R), device=like_R.device) if rows is None else rows


class AttentionSlots(SlotStates):
    """Keys and values of all slots, preallocated: (slots, K, max_seq_len, P)."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self._wide = dtype
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Store keys and values in 8 bits for ``torch.int8``, with one scale per head and token.

        A floating dtype has no effect: it concerns recurrent states, and keys and values have the dtype of
        the computation.

        Raises:
            ValueError: for other integer dtypes.

        """
        if dtype.is_floating_point:
            return
        if dtype != torch.int8:
            raise ValueError(f"keys and values cannot be stored in {dtype}; choose torch.int8")
        self.keys, self.values = (torch.zeros_like(kept, dtype=dtype) for kept in (self.keys, self.values))
        scales = torch.zeros(2, *self.keys.shape[:-1], device=self.keys.device)
        self.key_scales, self.value_scales = scales.unbind()

    @property
    def windows(self) -> bool:
        """Whether keys are not rounded to 8 bits: a token attends to the rounded keys before its own."""
        return self.key_scales is None

    def prefill(self, slot: int) -> State:
        """Return a view of the slot's memory, so that a prompt is written in place.

        With 8 bits it returns an empty state: a prompt is solved with unrounded keys, which are rounded once.
        """
        if self.key_scales is not None:
            nothing = self.keys[slot : slot + 1, :, :0].to(self._wide)
            return AttentionState(nothing, nothing, 0)
        return AttentionState(self.keys[slot : slot + 1], self.values[slot : slot + 1], 0)

    def commit_rows(self, mixer: Mixer, slots: Sequence[int], slots_B: Tensor, state: State) -> None:
        """Copy prompts to their slots, unless they were written there in place; padding may be dropped.

        The rest of the slots is zeroed: attention multiplies masked keys by 0, so that an overflow in an
        earlier text would give NaN in this one.
        """
        in_place = self.key_scales is None and state.keys.data_ptr() == self.keys[slots[0]].data_ptr()
        for kept, scales, of_state in (
            (self.keys, self.key_scales, state.keys),
            (self.values, self.value_scales, state.values),
        ):
            end = min(state.length, kept.shape[2])
            new = of_state[:, :, :end]
            if scales is not None:
                new, new_scales = eight_bits(new)
                scales[:, :, :end].index_copy_(0, slots_B, new_scales)
                scales[:, :, end:].index_fill_(0, slots_B, 0)
            if not in_place:
                kept[:, :, :end].index_copy_(0, slots_B, new.to(kept.dtype))
            kept[:, :, end:].index_fill_(0, slots_B, 0)

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> SlotKeys:
        """Return all slots and the indices of those in the step."""
        return SlotKeys(self.keys, self.values, rows_R, lengths_R, self.key_scales, self.value_scales)

    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """Do nothing: the token is already stored, and increasing the slot's length commits it."""
