"""A model's sequence state as a transformers cache.

The caches of transformers grow with every call of ``update``; an implicit model calls its layers many times
before it commits a token. Therefore the layers never see this cache: the model commits to it once per
window, after the window is solved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from implicit_blocks.models.stack import Block
from implicit_blocks.windows import SequenceState


class ImplicitCache(Cache):  # type: ignore[misc]  # transformers' classes are Any where its types are unknown
    """The sequence state of a model: ``state`` is None before the first token.

    Both families use this class, as ``past_key_values`` or as ``cache_params``. With a ``max_seq_len``,
    attention layers allocate their keys and values for that many tokens in advance (the static cache of
    transformers). To continue twice from a cache with a ``max_seq_len``, copy it first (``copy.deepcopy``).
    """

    def __init__(self, max_seq_len: int | None = None) -> None:
        super().__init__(layers=[])
        self.max_seq_len = max_seq_len
        self.state: SequenceState | None = None
        self._blocks: list[Block] | None = None

    def __repr__(self) -> str:
        return f"ImplicitCache(length={self.get_seq_length()}, max_seq_len={self.max_seq_len})"

    def commit(self, state: SequenceState, blocks: list[Block]) -> None:
        """Store the state after a window.

        Raises:
            ValueError: more than ``max_seq_len`` tokens are committed.

        """
        if self.max_seq_len is not None and state.length > self.max_seq_len:
            raise ValueError(
                f"the cache was created for {self.max_seq_len} tokens and {state.length} are committed; "
                "increase max_seq_len or omit it"
            )
        self.state, self._blocks = state, blocks

    # ------------------------------------------------------------------------------------ lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of committed tokens, including padding."""
        return 0 if self.state is None else self.state.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return ``max_seq_len``, or −1 if there is no limit."""
        return -1 if self.max_seq_len is None else self.max_seq_len

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return ``max_seq_len``, or −1 if there is no limit."""
        return self.get_max_length()

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a token has been committed."""
        return self.state is not None

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of tokens including the next ``query_length``, and the offset of the first: 0."""
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        """Rows of the state; −1 before the first token."""
        return -1 if self.state is None else self.state.batch_size

    @property
    def is_compileable(self) -> bool:
        """False: transformers must not compile generation with this cache."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a token has been committed."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """Whether committed tokens can be removed; a recurrent state cannot be truncated."""
        return self._blocks is not None and all(block.mixer.truncates for block in self._blocks)

    # ------------------------------------------------------------------------------------ rows

    def select_rows(self, rows: Tensor) -> None:
        """Select rows by index, (R,) int64; indices may repeat."""
        if self.state is not None:
            assert self._blocks is not None
            device = self.state.next_position.device
            self.state = self.state.select_rows(rows.to(device), self._blocks)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows of the surviving beams, (B,) int64."""
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index, (R,) int64."""
        self.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; copies are adjacent."""
        if self.state is not None:
            self.select_rows(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Remove all tokens."""
        self.state = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last committed tokens; ``tokens_to_remove`` is negative.

        Raises:
            ValueError: a layer has a recurrent state (Mamba2); or the number is positive, which older
                versions of transformers interpreted as the length to keep.

        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop was called with {tokens_to_remove}; pass a negative number, the tokens to remove"
            )
        if tokens_to_remove == 0:
            return
        if self.state is None or not self.is_croppable:
            content = "no tokens" if self.state is None else "a recurrent state, which cannot be truncated"
            raise ValueError(
                f"the cache contains {content}: cannot remove {-tokens_to_remove} tokens; copy the cache "
                "(copy.deepcopy) before committing them"
            )
        assert self._blocks is not None
        self.state = self.state.truncate(-tokens_to_remove, self._blocks)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Reject keys and values of any shape: layers write nothing while a fixed point is iterated.

        Raises:
            ValueError: always.

        """
        raise ValueError(
            "layers cannot write keys and values to an ImplicitCache; the model commits once per window"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ImplicitCache:
        clone = ImplicitCache(self.max_seq_len)
        clone._blocks = self._blocks  # they belong to the model, so they are not copied
        if self.state is not None:
            layers = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.state.layers
            )
            clone.state = replace(self.state, layers=layers)
        return clone
