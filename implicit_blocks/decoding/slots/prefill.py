"""Prompts solved in chunks beside running texts, and the reuse of committed prefixes.

A chunk is a window: the state after it is committed before the next one, so that the memory of a prompt does
not grow with its length, and running texts wait for one chunk at most. Chunks begin at multiples of their
length; a prompt that begins with the chunks of an earlier one continues from the state after them.

Shape legend: L tokens of a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.decoding.slots.prompts import commit_prompts, encode_tokens, limited_options
from implicit_blocks.decoding.slots.texts import Text
from implicit_blocks.mixers.attention.state import AttentionState
from implicit_blocks.specs.base import require_count
from implicit_blocks.windows import SequenceState

Key = tuple[float | None, int | None, tuple[int, ...]]


class PrefixCache:
    """The states after prefixes of prompts; the least recently used ones are dropped.

    Args:
        max_bytes: maximum size of all states together.

    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes, self.hits = max_bytes, 0, 0
        self._states: OrderedDict[Key, tuple[SequenceState, int]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._states)

    def find(self, key: Key) -> SequenceState | None:
        """Return the state after a prefix, if it is known."""
        if key not in self._states:
            return None
        self._states.move_to_end(key)
        return self._states[key][0]

    def store(self, key: Key, state: SequenceState) -> None:
        """Keep the state after a prefix, unless it alone exceeds the limit."""
        leaves = [leaf for leaf in pytree.tree_leaves(state.layers) if isinstance(leaf, Tensor)]
        size = sum(leaf.nbytes for leaf in leaves)
        if size > self.max_bytes or key in self._states:
            return
        self._states[key] = state, size
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, (_, dropped) = self._states.popitem(last=False)
            self.bytes -= dropped


class Prefill:
    """The prompts that are being solved in chunks, in the order of their texts.

    Args:
        batch: the slots.
        chunk: number of tokens per chunk.
        cache_bytes: size of the cache of prefixes; 0: none.

    """

    def __init__(self, batch: SlotBatch, *, chunk: int, cache_bytes: int) -> None:
        self.batch, self.chunk = batch, chunk
        self.cache = PrefixCache(cache_bytes)
        self._progress: OrderedDict[int, tuple[Text, SequenceState]] = OrderedDict()

    @property
    def texts(self) -> dict[int, Text]:
        """The texts whose prompts are being solved, by slot."""
        return {slot: text for slot, (text, _) in self._progress.items()}

    def enter(self, slot: int, text: Text) -> None:
        """Queue the prompt of a text."""
        empty = self.batch.model.initial_state(1)
        self._progress[slot] = text, _with_room(empty, text.ids.shape[1], dtype=self.batch.dtype)

    def leave(self, slot: int) -> None:
        """Drop the prompt of a slot, if there is one."""
        self._progress.pop(slot, None)

    @torch.no_grad()
    def step(self) -> int | None:
        """Solve one chunk of the first prompt; return its slot once the whole prompt is committed."""
        if not self._progress:
            return None
        slot, (text, state) = next(iter(self._progress.items()))
        if state.length == 0 and (known := self._known(text)) is not None:
            state = _with_room(known, text.ids.shape[1])
        end = min(state.length + self.chunk, text.ids.shape[1])
        request = text.request
        options = limited_options(self.batch, [slot], request.tolerance, request.max_iterations)
        encoded = encode_tokens(self.batch, text.ids[:, state.length : end], state, options)
        assert encoded.state is not None
        if end < text.ids.shape[1]:
            self._progress[slot] = text, encoded.state
            if self.cache.max_bytes:
                self.cache.store(_key(text, end), _with_room(encoded.state, end))
            return None
        commit_prompts(self.batch, [slot], encoded, lengths=[end], before=state.length)
        del self._progress[slot]
        return slot

    def _known(self, text: Text) -> SequenceState | None:
        """Return the state after the longest known prefix; the last chunk gives the text's first token."""
        for end in range((text.ids.shape[1] - 1) // self.chunk * self.chunk, 0, -self.chunk):
            state = self.cache.find(_key(text, end))
            if state is not None:
                self.cache.hits += 1
                return state
        return None


def check_prefill(chunk: int | None, cache_bytes: int, window_length: int | None) -> None:
    """Check the options of a decoder's prompts.

    Raises:
        ValueError: a number out of range, or options that exclude each other.

    """
    if chunk is not None:
        require_count("prefill_chunk", chunk)
        if window_length is not None:
            raise ValueError(
                f"window_length is {window_length} and prefill_chunk {chunk}, and both divide prompts; give "
                "one of them"
            )
    if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
        raise ValueError(
            f"prefix_cache_bytes is {cache_bytes!r}; choose a number of bytes, or 0 for no cache"
        )
    if cache_bytes and chunk is None:
        raise ValueError(
            f"prefix_cache_bytes is {cache_bytes}, and prefixes are those of chunks; set prefill_chunk too"
        )


def _with_room(state: SequenceState, tokens: int, *, dtype: torch.dtype | None = None) -> SequenceState:
    """Return a copy of a state whose keys and values have room for ``tokens`` tokens, in ``dtype`` if given.

    Chunks then write after the committed tokens in place: without room, each call of a search would copy all
    keys and values.
    """

    def with_room(layer: Any) -> Any:
        return layer.with_room(tokens, dtype=dtype) if isinstance(layer, AttentionState) else layer

    layers = pytree.tree_map(with_room, state.layers, is_leaf=lambda layer: isinstance(layer, AttentionState))
    return replace(state, layers=layers)


def _key(text: Text, end: int) -> Key:
    request = text.request
    return request.tolerance, request.max_iterations, tuple(text.ids[0, :end].tolist())
