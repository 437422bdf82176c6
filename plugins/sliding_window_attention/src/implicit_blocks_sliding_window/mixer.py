"""Sliding-window attention as a mixer: I. Beltagy et al., "Longformer", 2020; Mistral 7B, 2023.

"Window" has two meanings: the spec's ``window`` w is the number of tokens that a token attends to; a `Window`
is a range of tokens that is solved together. Below, "the window" is the latter.

Shape legend: B batch, L tokens of the window, S kept tokens, T = S + L, D model width, H query heads, K key
and value heads, P head width, U injection width = (H + 2K) · P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks import Mixer, Window
from implicit_blocks.layers import Linear
from implicit_blocks.mixers import PaddingPermutation, permute
from implicit_blocks.ops.attention import attend
from implicit_blocks.ops.rotary import rotate, rotation_tables
from implicit_blocks_sliding_window.band import BandMasks, attend_in_band, band_masks
from implicit_blocks_sliding_window.slots import NewKeys, SlidingWindowSlots, SlotWindow
from implicit_blocks_sliding_window.spec import SlidingWindowAttentionSpec
from implicit_blocks_sliding_window.state import SlidingWindowState


class SlidingWindowContext(NamedTuple):
    """Rotation tables, masks and the order of tokens for a window.

    Padding must not count in the distance between tokens. Therefore the real tokens of each row are moved to
    its front, attention runs over tokens without gaps, and the result is moved back. ``kept`` (B, S) are the
    indices, among earlier and permuted tokens, that the state after the window keeps. Both are None without
    padding.
    """

    cos: Tensor
    sin: Tensor
    masks: BandMasks
    real: PaddingPermutation | None = None
    kept: Tensor | None = None


class SlidingWindowAttention(Mixer):
    """``softmax(q k^T / √P) v`` over the token itself and the w − 1 real tokens of its document before it.

    ``q, k, v = W z + u``, then the rotation, as in the library's attention. The state has at most w − 1
    tokens, and the cost of a window of L tokens is proportional to L · w.

    Args:
        spec: window, numbers of heads and the rotary base.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: SlidingWindowAttentionSpec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.window = spec.window
        self.n_heads = spec.n_heads
        self.n_kv_heads = spec.n_kv_heads or spec.n_heads
        self.head_dim = d_model // spec.n_heads
        self.rope_theta = spec.rope_theta
        self.in_proj = Linear(d_model, self.injection_width, bias=False)
        self.out_proj = Linear(d_model, d_model, bias=False)

    @property
    def injection_width(self) -> int:
        """Total width of q, k and v."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> SlidingWindowState:
        """Return an empty state; it ignores ``max_seq_len``, since its size is bounded."""
        empty = torch.zeros(batch_size, self.n_kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        return SlidingWindowState(empty, empty)

    def select_rows(self, state: SlidingWindowState, rows: Tensor) -> SlidingWindowState:
        """Select rows of the state."""
        return SlidingWindowState(state.keys[rows], state.values[rows])

    def slots(
        self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int
    ) -> SlidingWindowSlots:
        """Return w − 1 entries per slot, for any ``max_seq_len``."""
        shape = (count, self.n_kv_heads, self.window - 1, self.head_dim)
        return SlidingWindowSlots(shape, device=device, dtype=dtype)

    def prepare(self, window: Window) -> SlidingWindowContext:
        """Compute rotation tables, masks and the order of tokens, shared by layers of equal shape."""
        key = (type(self), self.window, self.rope_theta, self.head_dim)
        context: SlidingWindowContext = window.once(key, lambda: self._context(window))
        return context

    def _context(self, window: Window) -> SlidingWindowContext:
        earlier = min(window.start, self.window - 1)
        positions, documents = window.positions_BL, window.documents_BL
        real, kept, known = window.real_first(), None, None
        if real is not None:
            assert window.valid_BT is not None
            positions = positions.expand_as(real.order_BL).gather(1, real.order_BL)
            known = window.valid_BT[:, : window.start].sum(1).clamp(max=earlier)
            kept = self._kept(window, real, earlier)
            documents = None if documents is None else documents.gather(1, real.order_BL)
        if documents is not None:
            before = window.documents_before(earlier)
            assert before is not None
            documents = torch.cat((before, documents), dim=1)
        cos, sin = rotation_tables(
            positions, head_dim=self.head_dim, theta=self.rope_theta, dtype=window.dtype
        )
        masks = band_masks(
            window.length,
            earlier,
            window=self.window,
            device=window.device,
            known_B=known if earlier else None,
            documents_BT=documents,
        )
        return SlidingWindowContext(cos, sin, masks, real, kept)

    def _kept(self, window: Window, real: PaddingPermutation, earlier: int) -> Tensor:
        """Return the indices of the last real tokens among earlier and permuted tokens, (B, S)."""
        entries = min(window.start + window.length, self.window - 1)
        end = earlier + real.count_B[:, None]
        # Indices before the first entry refer to entries that `known` marks as unused.
        return (end - entries + torch.arange(entries, device=window.device)).clamp(min=0)

    def forward(
        self,
        z_BLD: Tensor,
        u_BLU: Tensor | None,
        state: SlidingWindowState | SlotWindow,
        context: SlidingWindowContext,
    ) -> Tensor:
        """Attend from the window to itself and to the kept tokens."""
        return self._attend(z_BLD, u_BLU, state, context)[0]

    def advance(
        self,
        z_BLD: Tensor,
        u_BLU: Tensor | None,
        state: SlidingWindowState | SlotWindow,
        context: SlidingWindowContext,
    ) -> tuple[Tensor, SlidingWindowState | NewKeys]:
        """Attend, and keep the last w − 1 keys and values; for slots, return the new ones."""
        y, keys, values = self._attend(z_BLD, u_BLU, state, context)
        if isinstance(state, SlotWindow):
            return y, NewKeys(keys[:, :, -1:], values[:, :, -1:])
        return y, SlidingWindowState(self._last(keys, context), self._last(values, context))

    def _attend(
        self,
        z: Tensor,
        u: Tensor | None,
        state: SlidingWindowState | SlotWindow,
        context: SlidingWindowContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the keys and values of kept and new tokens, (B, K, S + L, P)."""
        batch, length, _ = z.shape
        qkv = self.in_proj(z)
        if u is not None:
            qkv = qkv + u
        if context.real is not None:
            qkv = permute(qkv, context.real.order_BL)
        heads = qkv.view(batch, length, self.n_heads + 2 * self.n_kv_heads, self.head_dim).transpose(1, 2)
        rotated = self.n_heads + self.n_kv_heads
        qk = rotate(heads[:, :rotated], context.cos, context.sin)
        q, k, v = qk[:, : self.n_heads], qk[:, self.n_heads :], heads[:, rotated:]
        keys = torch.cat((state[0].to(k.dtype), k), dim=2)
        values = torch.cat((state[1].to(v.dtype), v), dim=2)
        if isinstance(state, SlotWindow):
            y = attend(q, keys, values, mask=state.seen_R1W)
        else:
            y = attend_in_band(q, keys, values, context.masks, window=self.window)
        out: Tensor = self.out_proj(y.transpose(1, 2).reshape(batch, length, self.n_heads * self.head_dim))
        return out if context.real is None else permute(out, context.real.inverse_BL), keys, values

    def _last(self, x_BKTP: Tensor, context: SlidingWindowContext) -> Tensor:
        """Return the kept entries of earlier and new tokens, in separate storage."""
        if context.kept is not None:
            index = context.kept[:, None, :, None].expand(-1, x_BKTP.shape[1], -1, x_BKTP.shape[3])
            return x_BKTP.gather(2, index)
        tokens = x_BKTP.shape[2]
        first = max(0, tokens - (self.window - 1))
        # A view would keep the keys of the whole window alive.
        return x_BKTP[:, :, first:].clone(memory_format=torch.contiguous_format)

    def output_projections(self) -> Sequence[Linear]:
        """Return the output projection."""
        return (self.out_proj,)
