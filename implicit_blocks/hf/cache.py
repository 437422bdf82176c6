"""The committed state of a model as a cache of transformers.

transformers' own caches grow with every call of ``update``; an implicit model calls its layers many times
before a token is committed. So the layers never see this cache: the model commits to it once, when a
window is solved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from implicit_blocks.models.backbone import Backbone
from implicit_blocks.models.sequence_state import SequenceState


class ImplicitCache(Cache):  # type: ignore[misc]  # transformers' classes are Any where its types are unknown
    """What a model remembers of the tokens before: ``state``, None before the first.

    Both families use it, as ``past_key_values`` or ``cache_params``. With a ``max_seq_len`` the attention
    layers reserve room for so many tokens at once (transformers' static cache); continuing twice from one
    such cache needs a copy (``copy.deepcopy``) for each continuation.
    """

    def __init__(self, max_seq_len: int | None = None) -> None:
        super().__init__(layers=[])
        self.max_seq_len = max_seq_len
        self.state: SequenceState | None = None
        self._backbone: Backbone | None = None

    def __repr__(self) -> str:
        return f"ImplicitCache(length={self.get_seq_length()}, max_seq_len={self.max_seq_len})"

    def commit(self, state: SequenceState, backbone: Backbone) -> None:
        """Take the state after a window.

        Raises:
            ValueError: more tokens are committed than the cache was made for.

        """
        if self.max_seq_len is not None and state.length > self.max_seq_len:
            raise ValueError(
                f"the cache was made for {self.max_seq_len} tokens and {state.length} are committed; "
                "make it larger, or leave its capacity out"
            )
        self.state, self._backbone = state, backbone

    # ------------------------------------------------------------------------------------ lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Count the committed tokens, padding included."""
        return 0 if self.state is None else self.state.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the capacity; −1: none."""
        return -1 if self.max_seq_len is None else self.max_seq_len

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return the capacity; −1: none."""
        return self.get_max_length()

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a token has been committed."""
        return self.state is not None

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many tokens there are with the next ones, and the offset of the first: 0."""
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        """Rows of the state; −1 before the first token."""
        return -1 if self.state is None else self.state.batch_size

    @property
    def is_compileable(self) -> bool:
        """Generation with it isn't compiled by transformers."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a token has been committed."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """Whether committed tokens can be taken back: a state-space layer has folded them into its state."""
        return self._backbone is not None and self._backbone.truncates

    # ------------------------------------------------------------------------------------ rows

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, (R,) int64 indices, which may repeat."""
        if self.state is not None:
            assert self._backbone is not None
            device = self.state.next_position.device
            self.state = self.state.select_rows(rows.to(device), self._backbone)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams: keep the rows of these indices, (B,) int64."""
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these indices, (R,) int64."""
        self.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row so many times, copies side by side."""
        if self.state is not None:
            self.select_rows(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens."""
        self.state = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last committed tokens, given as a negative number, where all layers can.

        Raises:
            ValueError: where a layer cannot, as those of Mamba2; or for a positive number, by which older
                versions of transformers meant the length to keep.

        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop was called with {tokens_to_remove}; give the number of tokens to take back, negative"
            )
        if tokens_to_remove == 0:
            return
        if self.state is None or not self.is_croppable:
            held = (
                "no tokens" if self.state is None else "a state that has folded its tokens into one another"
            )
            raise ValueError(
                f"the cache holds {held}, so {-tokens_to_remove} cannot be taken back; keep a copy of it "
                "(copy.deepcopy) from before them"
            )
        assert self._backbone is not None
        self.state = self.state.truncate(-tokens_to_remove, self._backbone)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values, of whatever shape: layers write nothing while a fixed point is iterated.

        Raises:
            ValueError: always.

        """
        raise ValueError(
            "an ImplicitCache takes no keys and values from layers; the model commits to it, once a window"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ImplicitCache:
        clone = ImplicitCache(self.max_seq_len)
        clone._backbone = self._backbone  # the model's, not the cache's to copy
        if self.state is not None:
            layers = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.state.layers
            )
            clone.state = replace(self.state, layers=layers)
        return clone
