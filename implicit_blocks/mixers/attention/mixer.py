"""Causal attention with rotary positions and grouped heads, on the windowed contract.

J. Su et al., "RoFormer", 2021 (rotary positions); J. Ainslie et al., "GQA", 2023 (grouped heads).

Shape legend: B batch, L tokens of the window, T tokens so far, D model width, H query heads, K key and value
heads, P head width, U injection width = (H + 2K) · P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from implicit_blocks.interfaces import Mixer, Window
from implicit_blocks.layers import Linear
from implicit_blocks.mixers.attention.state import AttentionSlots, AttentionState, SlotKeys
from implicit_blocks.ops.attention import ATTENTION, Blocks, attend, find_blocks
from implicit_blocks.ops.attention.slots import attend_slots
from implicit_blocks.ops.rotary import rotate, rotation_tables
from implicit_blocks.specs import AttentionSpec


class AttentionContext(NamedTuple):
    """Rotations (1 or B, 1, L, P / 2), and the keys that a query sees, (…, L, T) bool, or None.

    ``causal`` without a mask means causal attention; with a mask, that the mask is the causal one. ``blocks``
    are those of flex attention.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    causal: bool
    blocks: Blocks | None = None


class Attention(Mixer):
    """``softmax(q k^T / √P) v`` over the token itself and those before it.

    ``q, k, v = W z + u``: the injection comes before the rotation. The projections of q, k and v are one
    matrix, rows in that order. The rotation pairs feature i of a head with feature i + P/2.

    Args:
        spec: numbers of heads, rotary positions, biases.
        d_model: width of the residual stream.

    """

    truncates = True

    def __init__(self, spec: AttentionSpec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.n_heads = spec.n_heads
        self.n_kv_heads = spec.n_kv_heads or spec.n_heads
        self.head_dim = spec.head_width(d_model)
        self.rope_theta = spec.rope_theta
        self.rope_scaling = spec.rope_scaling
        self.backend = spec.backend
        ATTENTION.require(spec.backend)
        self.in_proj = Linear(d_model, self.injection_width, bias=spec.bias)
        self.out_proj = Linear(self.n_heads * self.head_dim, d_model, bias=spec.bias)

    @property
    def injection_width(self) -> int:
        """Width of q, k and v together."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> AttentionState:
        """Return an empty cache, with room for ``max_seq_len`` tokens where given."""
        shape = (batch_size, self.n_kv_heads, max_seq_len or 0, self.head_dim)
        return AttentionState(
            torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype), 0
        )

    def select_rows(self, state: AttentionState, rows: Tensor) -> AttentionState:
        """Return the cache of these rows."""
        return AttentionState(state.keys[rows], state.values[rows], state.length)

    def slots(
        self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int
    ) -> AttentionSlots:
        """Return preallocated keys and values of all slots."""
        shape = (count, self.n_kv_heads, max_seq_len, self.head_dim)
        return AttentionSlots(shape, device=device, dtype=dtype)

    def truncate(self, state: AttentionState, length: int) -> AttentionState:
        """Return the cache of the first ``length`` tokens; a preallocated cache keeps its size."""
        if state.keys.shape[2] == state.length:
            return AttentionState(state.keys[:, :, :length], state.values[:, :, :length], length)
        return AttentionState(state.keys, state.values, length)

    def prepare(self, window: Window) -> AttentionContext:
        """Make the rotation tables and the mask of a window, shared by layers of equal shape."""
        cos, sin = window.once(
            ("rope", self.rope_theta, self.head_dim, self.rope_scaling),
            lambda: rotation_tables(
                window.positions_BL,
                head_dim=self.head_dim,
                theta=self.rope_theta,
                dtype=window.dtype,
                scaling=self.rope_scaling,
            ),
        )
        mask = window.once("attention mask", lambda: _mask(window))
        causal = window.length > 1 and window.valid_BT is None and window.documents_BT is None
        blocks = None
        if self.backend == "flex":
            blocks = window.once("attention blocks", lambda: _blocks(window, mask, causal))
        return AttentionContext(cos, sin, mask, causal, blocks)

    def forward(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: AttentionState | SlotKeys, context: AttentionContext
    ) -> Tensor:
        """Attend from the window to itself and to the committed tokens."""
        return self._attend(z_BLD, u_BLU, state, context)[0]

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: AttentionState | SlotKeys, context: AttentionContext
    ) -> tuple[Tensor, AttentionState | SlotKeys]:
        """Attend, and return the state with the window's keys and values."""
        return self._attend(z_BLD, u_BLU, state, context)

    def _attend(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: AttentionState | SlotKeys, context: AttentionContext
    ) -> tuple[Tensor, AttentionState | SlotKeys]:
        batch, length, _ = z_BLD.shape
        q, k, v = self._project(z_BLD, u_BLU, context)
        after: AttentionState | SlotKeys
        if isinstance(state, SlotKeys):
            y, after = self._attend_slots(q, k, v, state), state
        else:
            end = state.length + length
            keys, values = _extend(state.keys, state.length, k), _extend(state.values, state.length, v)
            y = attend(
                q,
                keys[:, :, :end],
                values[:, :, :end],
                mask=context.mask,
                causal=context.causal,
                blocks=context.blocks,
                backend=self.backend,
            )
            after = AttentionState(keys, values, end)
        out: Tensor = self.out_proj(y.transpose(1, 2).reshape(batch, length, self.n_heads * self.head_dim))
        return out, after

    def _attend_slots(self, q: Tensor, k: Tensor, v: Tensor, state: SlotKeys) -> Tensor:
        """Write each slot's key and value after its tokens, and attend from its token."""
        state.put(k[:, :, 0], v[:, :, 0])
        y = attend_slots(
            q[:, :, 0],
            state.keys_SKCP,
            state.values_SKCP,
            rows_R=state.rows_R,
            lengths_R=state.lengths_R + 1,
            key_scales_SKC=state.key_scales_SKC,
            value_scales_SKC=state.value_scales_SKC,
            own_keys_RKP=k[:, :, 0],
            own_values_RKP=v[:, :, 0],
        )
        return y[:, :, None]

    def _project(
        self, z: Tensor, u: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, heads, L, P), the first two rotated."""
        batch, length, _ = z.shape
        qkv = self.in_proj(z)
        if u is not None:
            qkv = qkv + u
        heads = qkv.view(batch, length, self.n_heads + 2 * self.n_kv_heads, self.head_dim).transpose(1, 2)
        rotated = self.n_heads + self.n_kv_heads
        qk = rotate(heads[:, :rotated], context.cos, context.sin)
        return qk[:, : self.n_heads], qk[:, self.n_heads :], heads[:, rotated:]

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the output projection."""
        return (self.out_proj,)


def _mask(window: Window) -> Tensor | None:
    """Return the keys that each query of the window sees; None where the position alone decides."""
    if window.valid_BT is None and window.documents_BT is None and (window.start == 0 or window.length == 1):
        return None
    end = window.start + window.length
    query = torch.arange(window.start, end, device=window.device)[:, None]
    key = torch.arange(end, device=window.device)
    mask = key <= query
    if window.documents_BT is not None and window.documents_BL is not None:
        mask = mask & (window.documents_BL[:, :, None] == window.documents_BT[:, None, :])
    if window.valid_BT is not None:
        mask = mask & window.valid_BT[:, None, :]
    # A padding token sees itself, so that no softmax is empty.
    return mask if mask.ndim == 2 else (mask | (key == query))[:, None]


def _blocks(window: Window, mask: Tensor | None, causal: bool) -> Blocks:
    """Return the blocks of the mask for flex attention."""
    keys = window.start + window.length
    return find_blocks(mask, length=window.length, keys=keys, causal=causal, device=window.device)


def _extend(buffer: Tensor, length: int, new: Tensor) -> Tensor:
    """Append ``new`` to the committed tokens: in place in a preallocated cache, else by concatenation."""
    end = length + new.shape[2]
    if buffer.shape[2] >= end and not torch.is_grad_enabled():
        buffer[:, :, length:end] = new
        return buffer
    return new if length == 0 else torch.cat((buffer[:, :, :length], new), dim=2)
