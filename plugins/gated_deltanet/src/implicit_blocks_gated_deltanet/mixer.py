"""Gated DeltaNet as a mixer: S. Yang, J. Kautz & A. Hatamizadeh, ICLR 2025.

Shape legend: B batch, L tokens of the window, D model width, H heads, K key width of a head, V value width, W
convolution taps, C convolved channels = H (2K + V), U injection width = H (2K + 2V + 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # conventional name

from implicit_blocks import Mixer, Window
from implicit_blocks.layers import Linear, RMSNorm, at_least_float32
from implicit_blocks.mixers.short_conv import DepthwiseConv, DocumentsAround, PaddingPermutation, permute
from implicit_blocks.mixers.slots import RecurrentSlots
from implicit_blocks.ops.causal_conv import causal_conv, conv_tail
from implicit_blocks_gated_deltanet.delta_rule import gated_delta_rule
from implicit_blocks_gated_deltanet.kernels import gated_delta_rule_fla
from implicit_blocks_gated_deltanet.spec import GatedDeltaNetSpec


class GatedDeltaNetState(NamedTuple):
    """The state after committed tokens: the convolution's last inputs, (B, W − 1, C), and S, (B, H, K, V).

    ``S`` is kept in float32 or better.
    """

    conv_BWC: Tensor
    S_BHKV: Tensor


class GatedDeltaNetContext(NamedTuple):
    """Whether the window starts a sequence, its padding and its documents, or None without them.

    Padding must separate neither the convolution's taps nor the state from the following tokens. Therefore
    the real tokens of each row are moved to its front, and the result is moved back. All other fields refer
    to the permuted tokens.
    """

    begins: bool
    real: PaddingPermutation | None = None
    last_taps_BW: Tensor | None = None  # positions of the last W − 1 real inputs in tail and window
    documents_BL: Tensor | None = None
    tail_documents_BW: Tensor | None = None
    initial_document_B: Tensor | None = None


class GatedDeltaNet(Mixer):
    """A matrix state with decay, in which writing a key replaces its old value.

    ``[gate, q, k, v, b, a] = W z + u``; ``q, k, v`` go through a causal convolution and SiLU, ``q`` and ``k``
    are then divided by their lengths; ``β = sigmoid(b)``, twice that with ``negative_eigenvalues``; ``g =
    −exp(A_log) · softplus(a + dt_bias)``; ``S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ``,
    ``o_t = S_tᵀ q_t / √K``; ``rms(o) · w · silu(gate)`` head by head, then the output projection.

    The eigenvalue of a step along its key is ``e^g (1 − β)``: positive as the paper has it, and down to −1
    with ``negative_eigenvalues`` (R. Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative
    Eigenvalues", ICLR 2025), where a step can swap the values of two keys. Gates, key norms and the state are
    computed in float32 or better, for any type of the projections.

    Args:
        spec: heads, widths, and ranges of the initial decay rates.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: GatedDeltaNetSpec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.spec = spec
        self.value_dim = spec.expand_v * spec.head_dim
        self.conv_width = 2 * spec.key_width + spec.value_width
        self.in_proj = Linear(d_model, self.injection_width, bias=spec.bias)
        self.conv = DepthwiseConv(self.conv_width, spec.d_conv, bias=spec.conv_bias)
        self.A_log = nn.Parameter(torch.empty(spec.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.n_heads))
        self.norm = RMSNorm(self.value_dim, eps=spec.norm_eps)
        self.out_proj = Linear(spec.value_width, d_model, bias=spec.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A uniformly and dt log-uniformly from the spec's ranges."""
        with torch.no_grad():
            self.A_log.uniform_(self.spec.a_min, self.spec.a_max).log_()
            low, high = math.log(self.spec.dt_min), math.log(self.spec.dt_max)
            dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp_()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    @property
    def injection_width(self) -> int:
        """Total width of gate, q, k, v, b and a."""
        return self.spec.value_width + self.conv_width + 2 * self.spec.n_heads

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> GatedDeltaNetState:
        """Return zeros; the state's size does not depend on the number of tokens."""
        shape = (batch_size, self.spec.n_heads, self.spec.head_dim, self.value_dim)
        return GatedDeltaNetState(
            torch.zeros(batch_size, self.spec.d_conv - 1, self.conv_width, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32)),
        )

    def select_rows(self, state: GatedDeltaNetState, rows: Tensor) -> GatedDeltaNetState:
        """Select rows of the state."""
        return GatedDeltaNetState(state.conv_BWC[rows], state.S_BHKV[rows])

    def slots(
        self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int
    ) -> RecurrentSlots:
        """Return one state per slot; its size does not depend on the length."""
        return RecurrentSlots(self, count, device=device, dtype=dtype)

    def prepare(self, window: Window) -> GatedDeltaNetContext:
        """Locate the inputs of the convolution's next tail, and the documents around the window."""
        taps = self.spec.d_conv
        context: GatedDeltaNetContext = window.once((type(self), taps), lambda: _context(window, taps))
        return context

    def forward(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: GatedDeltaNetState, context: GatedDeltaNetContext
    ) -> Tensor:
        """Mix the window."""
        y, _, _ = self._mix(z_BLD, u_BLU, state, context)
        return y

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: GatedDeltaNetState, context: GatedDeltaNetContext
    ) -> tuple[Tensor, GatedDeltaNetState]:
        """Mix the window and return the state after it."""
        y, conv_in, S = self._mix(z_BLD, u_BLU, state, context)
        tail = conv_tail(conv_in, state.conv_BWC, taps=self.spec.d_conv, last_taps_BW=context.last_taps_BW)
        return y, GatedDeltaNetState(tail, S)

    def _mix(
        self, z: Tensor, u: Tensor | None, state: GatedDeltaNetState, context: GatedDeltaNetContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the inputs of the convolution, and S after the window."""
        spec = self.spec
        projected: Tensor = self.in_proj(z)
        if u is not None:
            projected = projected + u
        if context.real is not None:
            projected = permute(projected, context.real.order_BL)
        gate, conv_in, b, a = projected.split(
            (spec.value_width, self.conv_width, spec.n_heads, spec.n_heads), dim=-1
        )
        beta = torch.sigmoid(at_least_float32(b)) * (2.0 if spec.negative_eigenvalues else 1.0)
        dt = F.softplus(at_least_float32(a) + at_least_float32(self.dt_bias))
        g = -torch.exp(at_least_float32(self.A_log)) * dt
        if context.real is not None:  # padding has no input and leaves the state unchanged
            valid = context.real.valid_BL[:, :, None]
            conv_in, beta, g = (t.where(valid, 0.0) for t in (conv_in, beta, g))
        conv_out = causal_conv(
            conv_in,
            self.conv.weight,
            self.conv.bias,
            tail_BWC=None if context.begins else state.conv_BWC,
            activation="silu",
            documents_BL=context.documents_BL,
            tail_documents_BW=context.tail_documents_BW,
        )
        q, k, v = conv_out.split((spec.key_width, spec.key_width, spec.value_width), dim=-1)
        q, k, v = (t.unflatten(-1, (spec.n_heads, -1)) for t in (q, k, v))
        q = _unit(q) / math.sqrt(spec.head_dim)
        before = None if context.begins else state.S_BHKV  # None instead of zeros saves products
        if spec.backend == "fla":
            o, S = gated_delta_rule_fla(
                q, _unit(k), v, g, beta, initial_state_BHKV=before, documents_BL=context.documents_BL
            )
        else:
            o, S = gated_delta_rule(
                q,
                _unit(k),
                v,
                g,
                beta,
                initial_state_BHKV=before,
                chunk_size=spec.chunk_size,
                documents_BL=context.documents_BL,
                initial_document_B=context.initial_document_B,
            )
        normed = self.norm(o).flatten(-2) * F.silu(gate)
        y: Tensor = self.out_proj(normed)
        return y if context.real is None else permute(y, context.real.inverse_BL), conv_in, S

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the output projection."""
        return (self.out_proj,)


def _unit(x: Tensor) -> Tensor:
    """Normalize the last dimension, in float32 or better; zeros stay zeros."""
    wide = at_least_float32(x)
    # As in the kernels; the clamp of F.normalize would make the gradient discontinuous at short vectors.
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _context(window: Window, taps: int) -> GatedDeltaNetContext:
    begins, real = window.start == 0, window.real_first()
    last = None if real is None else real.count_B[:, None] + real.count_B.new_tensor(range(taps - 1))
    return GatedDeltaNetContext(begins, real, last, *DocumentsAround.of(window, taps=taps, real=real))
