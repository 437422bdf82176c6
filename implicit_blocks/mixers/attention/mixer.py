"""Attention with rotary positions and grouped heads, on the windowed contract.

J. Su et al., "RoFormer", 2021 (rotary positions); J. Ainslie et al., "GQA", 2023 (grouped heads);
A. Henry et al., "Query-Key Normalization for Transformers", 2020 (here RMS norms of each head, as in Qwen3,
2025); A. Karpathy, "nanochat", 2025 (gated value embeddings).

Shape legend: B batch, L tokens of the window, T tokens so far, D model width, H query heads, K key and value
heads, P head width, U injection width = (H + 2K) · P, V rows of the table of value embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses
from torch.nn.attention.bias import causal_lower_right

from implicit_blocks.interfaces import Mixer
from implicit_blocks.layers import Linear, RMSNorm, at_least_float32, reset_linear_
from implicit_blocks.mixers.attention import VALUE_GATE_CHANNELS
from implicit_blocks.mixers.attention.state import AttentionSlots, AttentionState, SlotKeys
from implicit_blocks.ops.attention import ATTENTION, Blocks, attend, find_blocks
from implicit_blocks.ops.attention.slots import attend_slot_windows, attend_slots
from implicit_blocks.ops.backends import is_transformed, is_vmapped
from implicit_blocks.ops.rotary import rotate, rotation_tables
from implicit_blocks.parallel.sequence import SequencePart
from implicit_blocks.specs import AttentionSpec
from implicit_blocks.windows import Window

BIDIRECTIONAL = "bidirectional attention (causal: false)"


class AttentionContext(NamedTuple):
    """Rotations (1 or B, 1, L, P / 2), and the keys that a query sees, (…, L, T) bool, or None.

    ``causal`` without a mask means causal attention; with a mask, that the mask is the causal one. ``blocks``
    are those of flex attention; ``ids_BL`` (B, L) are the token IDs, for value embeddings; ``part`` is set if
    other ranks have the keys and values of earlier tokens.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    causal: bool
    blocks: Blocks | None = None
    ids_BL: Tensor | None = None
    part: SequencePart | None = None


class ValueEmbedding(nn.Embedding):
    """The table of value embeddings, (V, K · P)."""

    def reset_parameters(self) -> None:
        """Initialize as linear layers are: uniform in ±1/√(K · P)."""
        reset_linear_(self)


class Attention(Mixer):
    """``softmax(q k^T / √P) v`` over the token itself and those before it, or over all tokens.

    In this order, each step but the first and the last only where the spec has it:

    1. ``q, k, v = W z + b + u``, with the injection u. The projections are one matrix, rows in that order.
    2. ``v ← v + 2 σ(G z[:32]) E[token]``: value embeddings, with one gate per key and value head.
    3. ``q, k, v ← clamp(q, k, v, −c, c)``.
    4. ``q, k ← q + b_q, k + b_k``, the bias of kind "qk".
    5. ``q, k ← q / RMS(q) · w_q, k / RMS(k) · w_k``: a norm of each head, with or without weights.
    6. The rotation of q and k pairs feature i of a head with feature i + P/2.

    Without ``causal`` every token attends to all real tokens of its document. A window must then be a whole
    sequence: there are no windows after committed tokens, no truncation and no slots.

    Args:
        spec: numbers of heads, rotary positions, options.
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
        self.bias, self.clip_qkv = spec.bias, spec.clip_qkv
        self.qk_norm, self.qk_norm_eps = spec.qk_norm, spec.qk_norm_eps
        self.causal = spec.causal
        self.truncates = spec.causal  # type: ignore[misc]  # known by instance
        self.needs_token_ids = spec.value_embeddings is not None
        self.initial_state_kind = Attention, self.n_kv_heads, self.head_dim
        self.in_proj = Linear(d_model, self.injection_width, bias=spec.has_input_bias)
        self.out_proj = Linear(self.n_heads * self.head_dim, d_model, bias=spec.has_output_bias)
        rotated = (self.n_heads + self.n_kv_heads) * self.head_dim
        self.qk_bias = nn.Parameter(torch.zeros(rotated)) if spec.bias == "qk" else None
        if spec.qk_norm == "weighted":
            self.q_norm = RMSNorm(self.head_dim, eps=spec.qk_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=spec.qk_norm_eps)
        if spec.value_embeddings is not None:
            self.value_gate = Linear(VALUE_GATE_CHANNELS, self.n_kv_heads, bias=False)
            self.value_embedding = ValueEmbedding(spec.value_embeddings, self.n_kv_heads * self.head_dim)

    @property
    def is_plain(self) -> bool:
        """Whether attention is causal, and a token's heads are those of the projection, normed and rotated.

        Fused kernels support only this case.
        """
        options = self.clip_qkv is not None or self.needs_token_ids
        return self.causal and not options and isinstance(self.bias, bool)

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
        """Return preallocated keys and values of all slots.

        Raises:
            ValueError: attention is bidirectional.

        """
        if not self.causal:
            raise ValueError(f"{BIDIRECTIONAL} has no slots for decoding; choose causal: true to generate")
        shape = (count, self.n_kv_heads, max_seq_len, self.head_dim)
        return AttentionSlots(shape, device=device, dtype=dtype)

    def truncate(self, state: AttentionState, length: int) -> AttentionState:
        """Return the cache of the first ``length`` tokens; a preallocated cache keeps its size.

        Raises:
            ValueError: attention is bidirectional.

        """
        if not self.causal:
            raise ValueError(
                f"{BIDIRECTIONAL} has a state that depends on all tokens and cannot be truncated; "
                "keep the earlier state, or choose causal: true"
            )
        if state.keys.shape[2] == state.length:
            return AttentionState(state.keys[:, :, :length], state.values[:, :, :length], length)
        return AttentionState(state.keys, state.values, length)

    def prepare(self, window: Window) -> AttentionContext:
        """Make the rotation tables and the mask of a window, shared by layers of equal shape.

        Raises:
            ValueError: a bidirectional window follows committed tokens, or value embeddings lack token IDs.

        """
        if not self.causal and window.start > 0:
            raise ValueError(
                f"{BIDIRECTIONAL} cannot mix a window that follows {window.start} committed tokens, whose "
                "outputs would depend on it; mix the sequence as one window (no window_length, no "
                "commit_prefix, stopping scope 'sequence', no generation), or choose causal: true"
            )
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
        mask = window.once(("attention mask", self.causal, self.backend), lambda: _mask(self, window))
        plain = window.valid_BT is None and window.documents_BT is None
        causal = self.causal and window.length > 1 and plain
        blocks = None
        if self.backend == "flex":
            blocks = window.once(("attention blocks", self.causal), lambda: _blocks(window, mask, causal))
        return AttentionContext(cos, sin, mask, causal, blocks, _ids(self, window), window.part)

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

    def advance_prefix(
        self,
        z_BLD: Tensor,
        u_BLU: Tensor | None,
        state: AttentionState | SlotKeys,
        context: AttentionContext,
        prefix: AttentionContext,
    ) -> tuple[Tensor, AttentionState | SlotKeys]:
        """Attend; in slots the keys and values of all tokens are written, and lengths commit the first."""
        if isinstance(state, SlotKeys):
            return self._attend(z_BLD, u_BLU, state, context)
        return super().advance_prefix(z_BLD, u_BLU, state, context, prefix)

    def _attend(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: AttentionState | SlotKeys, context: AttentionContext
    ) -> tuple[Tensor, AttentionState | SlotKeys]:
        batch, length, _ = z_BLD.shape
        q, k, v = self._project(z_BLD, u_BLU, context)
        after: AttentionState | SlotKeys
        if isinstance(state, SlotKeys):
            y, after = self._attend_slots(q, k, v, state), state
        else:
            keys, values, end = _up_to_here(k, v, state, context)
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
        """Write each slot's keys and values after its tokens, and attend from the window's tokens."""
        if q.shape[2] > 1:
            state.put_window(k, v)
            return attend_slot_windows(
                q, state.keys_SKCP, state.values_SKCP, rows_R=state.rows_R, lengths_R=state.lengths_R
            )
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
        qk, v = heads[:, :rotated], heads[:, rotated:]
        if context.ids_BL is not None:
            v = v + self._of_tokens(z, context.ids_BL).to(v.dtype)
        if self.clip_qkv is not None:
            qk, v = (part.clamp(-self.clip_qkv, self.clip_qkv) for part in (qk, v))
        if self.qk_bias is not None:
            qk = qk + self.qk_bias.view(rotated, 1, self.head_dim).to(qk.dtype)
        qk = self._normed(qk)
        qk = rotate(qk, context.cos, context.sin)
        return qk[:, : self.n_heads], qk[:, self.n_heads :], v

    def _normed(self, qk: Tensor) -> Tensor:
        """Return queries and keys, (B, H + K, L, P), divided by the root mean square of each head."""
        if self.qk_norm == "none":
            return qk
        if self.qk_norm == "weighted":
            return torch.cat((self.q_norm(qk[:, : self.n_heads]), self.k_norm(qk[:, self.n_heads :])), dim=1)
        return F.rms_norm(at_least_float32(qk), (self.head_dim,), eps=self.qk_norm_eps).to(qk.dtype)

    def _of_tokens(self, z: Tensor, ids_BL: Tensor) -> Tensor:
        """Return the gated value embeddings of the tokens, (B, K, L, P)."""
        gate_BLK = 2 * self.value_gate(z[..., :VALUE_GATE_CHANNELS]).sigmoid()
        values_BLKP = self.value_embedding(ids_BL).unflatten(-1, (self.n_kv_heads, self.head_dim))
        gated: Tensor = (gate_BLK[..., None] * values_BLKP).transpose(1, 2)
        return gated

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the output projection."""
        return (self.out_proj,)

    def reset_parameters(self) -> None:
        """Set the bias of queries and keys to 0."""
        if self.qk_bias is not None:
            nn.init.zeros_(self.qk_bias)


def _mask(mixer: Attention, window: Window) -> Tensor | None:
    """Return the keys that each query of the window sees; None where the position alone decides."""
    causal, plain = mixer.causal, window.valid_BT is None and window.documents_BT is None
    if plain and (window.start == 0 or window.length == 1):
        return None
    end = window.start + window.length
    if window.part is not None:
        window.part.check(window)
    # Torch's fused kernels read this mask as one number, where a tensor has an entry per pair.
    number = window.part is not None or (window.device.type == "cuda" and not torch.is_grad_enabled())
    if plain and number and causal and mixer.backend in ("auto", "sdpa") and not is_transformed():
        return causal_lower_right(window.length, end)
    query = torch.arange(window.start, end, device=window.device)[:, None]
    key = torch.arange(end, device=window.device)
    mask = key <= query if causal else (key >= 0).expand(len(query), -1)
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


def _up_to_here(
    k: Tensor, v: Tensor, state: AttentionState, context: AttentionContext
) -> tuple[Tensor, Tensor, int]:
    """Return the keys and values up to the window's last token, and the number of those tokens."""
    if context.part is not None:
        keys, values = context.part.up_to_here(k, v)
        return keys, values, keys.shape[2]
    keys, values = _extend(state.keys, state.length, k), _extend(state.values, state.length, v)
    return keys, values, state.length + k.shape[2]


def _extend(buffer: Tensor, length: int, new: Tensor) -> Tensor:
    """Append ``new`` to the committed tokens: in place in a preallocated cache, else by concatenation."""
    end = length + new.shape[2]
    if buffer.shape[2] >= end and not torch.is_grad_enabled():
        buffer[:, :, length:end] = new
        return buffer
    return new if length == 0 else torch.cat((buffer[:, :, :length], new), dim=2)


def _ids(mixer: Attention, window: Window) -> Tensor | None:
    """Return the token IDs that value embeddings need, checked where that is free of cost."""
    if not mixer.needs_token_ids:
        return None
    ids = window.ids_BL
    if ids is None:
        raise ValueError(
            "value_embeddings need the token IDs of the window, which are missing; give token IDs to the "
            "model, or ids_BL to the Window"
        )
    rows = mixer.value_embedding.num_embeddings
    # On a GPU the check would wait for the device; compilers and vmap have no values.
    readable = ids.device.type == "cpu" and not torch.compiler.is_compiling() and not is_vmapped()
    if readable and bool((ids >= rows).any()):
        raise ValueError(
            f"token ID {int(ids.max())} has no value embedding: the table has {rows} rows; set "
            "value_embeddings to the size of the vocabulary"
        )
    return ids
