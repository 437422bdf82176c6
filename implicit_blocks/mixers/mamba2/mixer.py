"""The Mamba2 mixer: a gated state-space layer with an input-dependent scan, on the windowed contract.

T. Dao and A. Gu, "Transformers are SSMs", ICML 2024.

Shape legend: B batch, L tokens of the window, D model width, I inner width = H · P, H heads, P head width, G
groups, N state width, W convolution taps, C convolved channels = I + 2GN, U injection width = 2I + 2GN + H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks._utils.module_hooks import has_hooks
from implicit_blocks._utils.padding import permute
from implicit_blocks.interfaces import Mixer
from implicit_blocks.layers import DepthwiseConv, Linear, RMSNorm, at_least_float32
from implicit_blocks.mixers.mamba2.state import Mamba2Prefix, Mamba2Slots, Mamba2State
from implicit_blocks.mixers.short_conv import DocumentsAround
from implicit_blocks.ops import mamba2_mix
from implicit_blocks.ops.backends import AUTO, is_differentiated_forward
from implicit_blocks.ops.causal_conv import CAUSAL_CONV, causal_conv, conv_tail
from implicit_blocks.ops.float8 import Float8Weight
from implicit_blocks.ops.mamba2_after import eligible as eligible_after
from implicit_blocks.ops.mamba2_after import mamba2_after
from implicit_blocks.ops.mamba2_float8 import mamba2_float8
from implicit_blocks.ops.ssd import SSD, ssd
from implicit_blocks.parallel.sequence import SequencePart, state_before
from implicit_blocks.specs import Mamba2Spec
from implicit_blocks.windows import Window


class Mamba2Context(NamedTuple):
    """Whether the window begins a sequence; its padding and documents, or None without them.

    No padding may separate two real tokens, including those of the convolution's tail, or divide documents.
    Where it does, the real tokens are moved to the front (``order_BL``) and back (``inverse_BL``); the other
    fields then describe the permuted tokens. In a first window with a single document, padding on either side
    has the effect of the zeros before the sequence. With ``part`` other ranks have the state before the
    window, also before the first one, which is zero.
    """

    begins: bool
    valid_BL: Tensor | None = None
    last_taps_BW: Tensor | None = None  # indices of the W − 1 last real inputs in tail and window together
    documents_BL: Tensor | None = None
    tail_documents_BW: Tensor | None = None
    initial_document_B: Tensor | None = None
    order_BL: Tensor | None = None
    inverse_BL: Tensor | None = None
    u_rows_BL: Tensor | None = None
    part: SequencePart | None = None

    @property
    def plain(self) -> bool:
        """Whether the window begins a sequence, without padding or documents."""
        return self.begins and self.valid_BL is None and self.documents_BL is None

    @property
    def continues(self) -> bool:
        """Whether the window follows committed tokens, without padding or documents."""
        whole = self.part is None and self.valid_BL is None and self.documents_BL is None
        return whole and not self.begins


class Mamba2(Mixer):
    """Projection, short causal convolution, SSD scan, gated norm, projection.

    ``[gate, x, B, C, dt] = W z + u``; ``x, B, C`` go through the convolution and SiLU; ``dt = softplus(dt +
    dt_bias)``, ``A = −exp(A_log)``; ``h_t = exp(A dt_t) h_{t−1} + dt_t x_t B_tᵀ``, ``y_t = h_t C_t + D x_t``;
    ``rms(y · silu(gate)) · w``, then the output projection. The H / G heads of a group share B and C, and
    each group has its own norm, unless the spec sets ``norm_groups``. ``A``, ``dt`` and the state are in
    float32 or better, for any dtype of the projections.

    Args:
        spec: widths, and the ranges of the initial A and dt.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: Mamba2Spec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.spec, self.initial_state_kind = spec, (Mamba2, spec, d_model)
        if (spec.backend, spec.conv_backend) != (AUTO, AUTO):  # named: they must be installed
            SSD.require(spec.backend)
            CAUSAL_CONV.require(spec.conv_backend)
        self.d_inner = spec.expand * d_model
        self.n_heads, self.n_groups = self.d_inner // spec.head_dim, spec.n_groups
        self.conv_width = self.d_inner + 2 * spec.n_groups * spec.d_state
        self.in_proj = Linear(d_model, self.injection_width, bias=spec.bias)
        self.conv = DepthwiseConv(self.conv_width, spec.d_conv, bias=spec.conv_bias)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(self.n_heads)) for _ in range(3))
        self.norm = RMSNorm(self.d_inner, eps=spec.norm_eps, groups=spec.norm_groups or spec.n_groups)
        self.out_proj = Linear(self.d_inner, d_model, bias=spec.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A uniformly and dt log-uniformly from the spec's ranges; D is 1."""
        with torch.no_grad():
            self.A_log.uniform_(self.spec.a_min, self.spec.a_max).log_()
            low, high = math.log(self.spec.dt_min), math.log(self.spec.dt_max)
            dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp_()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            self.D.fill_(1.0)

    @property
    def injection_width(self) -> int:
        """Width of gate, x, B, C and dt together."""
        return self.d_inner + self.conv_width + self.n_heads

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> Mamba2State:
        """Return zeros; the state's size does not depend on the number of tokens."""
        wide = torch.promote_types(dtype, torch.float32)
        h_shape = (batch_size, self.n_heads, self.spec.head_dim, self.spec.d_state)
        return Mamba2State(
            torch.zeros(batch_size, self.spec.d_conv - 1, self.conv_width, device=device, dtype=dtype),
            torch.zeros(h_shape, device=device, dtype=wide),
        )

    def select_rows(self, state: Mamba2State, rows: Tensor) -> Mamba2State:
        """Return the state of these rows."""
        return Mamba2State(state.conv_BWC[rows], state.h_BHPN[rows])

    def slots(self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int) -> Mamba2Slots:
        """Return one state per slot; its size does not depend on ``max_seq_len``."""
        return Mamba2Slots(self, count, device=device, dtype=dtype)

    def supports_injection_table(self, window: Window) -> bool:
        """Whether the GPU's fused operator runs the window: it reads the injection from the table."""
        half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != torch.float32
        plain = window.start == 0 and window.valid_BT is None and window.documents_BT is None
        return half and _fusible(self, window.device, window.length, plain)

    def prepare(self, window: Window) -> Mamba2Context:
        """Return the indices of the convolution's next tail, and the documents around the window."""
        if window.part is None and window.valid_BT is None and window.documents_BT is None:
            return Mamba2Context(window.start == 0, u_rows_BL=window.u_rows_BL)
        return window.once(("mamba2", self.spec.d_conv), lambda: _context(window, self.spec.d_conv))

    def forward(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: Mamba2State, context: Mamba2Context
    ) -> Tensor:
        """Mix the window."""
        if (fused := self._fused(z_BLD, u_BLU, state, context, return_state=False)) is not None:
            return fused[0]
        gate, conv_in, dt = self._project(z_BLD, u_BLU, context)
        y, _ = self._scan(gate, conv_in, dt, state, context, return_final_state=False)
        return y if context.inverse_BL is None else permute(y, context.inverse_BL)

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: Mamba2State, context: Mamba2Context
    ) -> tuple[Tensor, Mamba2State]:
        """Mix the window and return the state after it."""
        no_grad = not torch.is_grad_enabled()
        fused = self._fused(z_BLD, u_BLU, state, context, return_state=True) if no_grad else None
        if fused is not None:
            out, h_after, projected = fused
            assert h_after is not None
            late, convolved = slice(1 - self.spec.d_conv, None), slice(self.d_inner, -self.n_heads)
            last = projected[:, late, convolved]
            if u_BLU is not None:
                rows = context.u_rows_BL
                last = last + (u_BLU[:, late] if rows is None else u_BLU[rows[:, late]])[..., convolved]
            return out, Mamba2State(last.clone(), h_after)
        gate, conv_in, dt = self._project(z_BLD, u_BLU, context)
        y, h = self._scan(gate, conv_in, dt, state, context, return_final_state=True)
        assert h is not None
        tail = conv_tail(conv_in, state.conv_BWC, taps=self.spec.d_conv, last_taps_BW=context.last_taps_BW)
        y = y if context.inverse_BL is None else permute(y, context.inverse_BL)
        return y, Mamba2State(tail, h)

    def advance_prefix(
        self,
        z_BLD: Tensor,
        u_BLU: Tensor | None,
        state: Mamba2State,
        context: Mamba2Context,
        prefix: Mamba2Context,
    ) -> tuple[Tensor, Mamba2State]:
        """Project and mix the window once; a second scan of its inputs gives the state."""
        gate, conv_in, dt = self._project(z_BLD, u_BLU, context)
        y, h = self._scan(
            gate, conv_in, dt, state, context, return_final_state=True, first_BL=prefix.valid_BL
        )
        assert h is not None
        tail = conv_tail(conv_in, state.conv_BWC, taps=self.spec.d_conv, last_taps_BW=prefix.last_taps_BW)
        return y, Mamba2Prefix(tail, h)

    def _fused(
        self, z: Tensor, u: Tensor | None, state: Mamba2State, context: Mamba2Context, *, return_state: bool
    ) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """Return output, state and projection by the GPU's fused operator; None where it does not apply."""
        after = context.continues and not torch.is_grad_enabled()
        if not _fusible(self, z.device, z.shape[1], context.plain or after) or is_differentiated_forward():
            return None
        if _is_watched_or_strided(self) or (after and not eligible_after(z.shape[1], self.spec.d_conv)):
            return None
        projected: Tensor = self.in_proj(z)
        if not mamba2_mix.suits(projected):
            return None
        if after:
            return _mixed_after(self, projected, u, state, context.u_rows_BL)
        if not return_state and (out := _mixed_in_8_bits(self, projected, u, context)) is not None:
            return out, None, projected
        # With gradients the operator includes the output projection, unless that is wrapped or has hooks.
        plain = type(self.out_proj).forward is Linear.forward and not has_hooks(self.out_proj)
        last = self.out_proj if plain and torch.is_grad_enabled() else None
        out_weight, out_bias = (None, None) if last is None else last.current()
        mixed, h = mamba2_mix.mamba2_mix(
            projected,
            u,
            rows_BL=context.u_rows_BL,
            weights=_weights(self),
            sizes=_sizes(self),
            return_state=return_state,
            out_weight_DI=out_weight,
            out_bias_D=out_bias,
        )
        return mixed if last is not None else self.out_proj(mixed), h, projected

    def _project(self, z: Tensor, u: Tensor | None, context: Mamba2Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate, input of the convolution and dt, the real tokens first; padding contributes zeros."""
        if context.order_BL is not None:
            z, u = permute(z, context.order_BL), permute(u, context.order_BL)
        projected: Tensor = self.in_proj(z)
        if u is not None:
            projected = projected + (u if context.u_rows_BL is None else F.embedding(context.u_rows_BL, u))
        gate, conv_in, dt = projected.split((self.d_inner, self.conv_width, self.n_heads), dim=-1)
        dt = F.softplus(at_least_float32(dt) + at_least_float32(self.dt_bias))
        if context.valid_BL is not None:
            valid = context.valid_BL[:, :, None]
            conv_in, dt = conv_in.where(valid, 0.0), dt.where(valid, 0.0)
        return gate, conv_in, dt

    def _scan(
        self,
        gate: Tensor,
        conv_in: Tensor,
        dt: Tensor,
        state: Mamba2State,
        context: Mamba2Context,
        *,
        return_final_state: bool,
        first_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixed window and, on request, h after it, or after its tokens ``first_BL``."""
        tail, (batch, length, _) = _tail_before(conv_in, state, context), conv_in.shape
        conv_out = causal_conv(
            conv_in,
            self.conv.weight,
            self.conv.bias,
            tail_BWC=tail,
            activation="silu",
            documents_BL=context.documents_BL,
            tail_documents_BW=context.tail_documents_BW,
            backend=self.spec.conv_backend,
        )
        groups, maps = self.n_groups, self.n_groups * self.spec.d_state
        x, B, C = conv_out.split((self.d_inner, maps, maps), dim=-1)
        x = x.view(batch, length, self.n_heads, self.spec.head_dim)
        scan = partial(
            ssd,
            x,
            A_H=-torch.exp(at_least_float32(self.A_log)),
            B_BLGN=B.unflatten(-1, (groups, -1)),
            C_BLGN=C.unflatten(-1, (groups, -1)),
            initial_state_BHPN=None if context.begins else state.h_BHPN,  # skip the products with zeros
            chunk_size=self.spec.chunk_size,
            documents_BL=context.documents_BL,
            initial_document_B=context.initial_document_B,
            backend=self.spec.backend,
        )
        if context.part is not None:
            scan = partial(scan, initial_state_BHPN=state_before(context.part, x, dt, **scan.keywords))
        y, h = scan(dt, return_final_state=return_final_state and first_BL is None)
        if first_BL is not None:
            _, h = scan(dt.where(first_BL[:, :, None], 0.0), return_final_state=True)
        y = torch.addcmul(y, x, self.D[:, None].to(x.dtype)).reshape(batch, length, self.d_inner)
        out: Tensor = self.out_proj(self.norm(y * F.silu(gate)))
        return out, h

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the output projection."""
        return (self.out_proj,)


def _context(window: Window, taps: int) -> Mamba2Context:
    if window.part is not None:
        window.part.check(window, taps=taps)
    begins, valid = window.start == 0 and window.part is None, window.valid_BL
    # In a first window of one document padding on either side acts like the zeros before the sequence.
    stays = begins and window.documents_BT is None and not window.gaps
    real = None if stays else window.real_first()
    order = inverse = last = None
    if real is not None:
        valid, order, inverse = real.valid_BL, real.order_BL, real.inverse_BL
    if valid is not None:
        # The tail holds the last real inputs: with padding on the right these are not the window's last ones.
        index = torch.arange(1, window.length + 1, device=window.device)
        end = (valid * index).amax(1)  # number of tokens up to and including the last real one
        last = end[:, None] + torch.arange(taps - 1, device=window.device)
    around = DocumentsAround()
    if window.documents_BT is not None:
        around = DocumentsAround.of(window, taps=taps, real=real)
    return Mamba2Context(begins, valid, last, *around, order, inverse, window.u_rows_BL, window.part)


def _tail_before(conv_in: Tensor, state: Mamba2State, context: Mamba2Context) -> Tensor | None:
    """Return the inputs of the convolution before the window, (B, W, C); None where they are zeros."""
    if context.part is not None:
        return context.part.tail_before(conv_in, state.conv_BWC.shape[1])
    return None if context.begins else state.conv_BWC


def _fusible(mixer: Mamba2, device: torch.device, length: int, plain: bool) -> bool:
    spec = mixer.spec
    if device.type != "cuda" or not plain or (spec.backend, spec.conv_backend) != (AUTO, AUTO):
        return False
    return mamba2_mix.eligible(length, spec.d_conv, _sizes(mixer))


def _mixed_after(
    mixer: Mamba2, projected: Tensor, u: Tensor | None, state: Mamba2State, rows_BL: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, state and projection of a window after committed tokens, by the fused operator."""
    mixed, h = mamba2_after(
        projected,
        u,
        rows_BL=rows_BL,
        tail_BWC=state.conv_BWC,
        state_BHPN=state.h_BHPN,
        weights=_weights(mixer),
        sizes=_sizes(mixer),
    )
    return mixer.out_proj(mixed), h, projected


def _mixed_in_8_bits(
    mixer: Mamba2, projected: Tensor, u: Tensor | None, context: Mamba2Context
) -> Tensor | None:
    """Return the output by the operator that ends in 8-bit floats; None: the output projection has others."""
    weight, bias = getattr(mixer.out_proj, "cached", None) or (None, None)
    if not isinstance(weight, Float8Weight) or mixer.norm.groups > 1 or has_hooks(mixer.out_proj):
        return None
    return mamba2_float8(
        projected,
        u,
        rows_BL=context.u_rows_BL,
        weights=_weights(mixer),
        sizes=_sizes(mixer),
        out_weight_DI=weight,
        out_bias_D=bias,
    )


def _is_watched_or_strided(mixer: Mamba2) -> bool:
    """Whether the norm has hooks or another class, or parameters are strided: never fused."""
    if torch.compiler.is_compiling():
        return False
    replaced = has_hooks(mixer.norm) or not isinstance(mixer.norm, RMSNorm)
    return replaced or not all(t is None or t.is_contiguous() for t in _weights(mixer))


def _weights(mixer: Mamba2) -> mamba2_mix.Mamba2Weights:
    conv = mixer.conv
    return mamba2_mix.Mamba2Weights(
        conv.weight, conv.bias, mixer.dt_bias, mixer.A_log, mixer.D, mixer.norm.weight
    )


def _sizes(mixer: Mamba2) -> mamba2_mix.Mamba2Sizes:
    return mamba2_mix.Mamba2Sizes(
        mixer.n_heads,
        mixer.spec.head_dim,
        mixer.n_groups,
        mixer.spec.d_state,
        mixer.norm.groups,
        mixer.norm.eps,
    )
