"""RWKV-7's time mixing as a mixer: B. Peng et al., 2025, section 4.

Shape legend: B batch, L tokens of the window, D model width, H heads, K head width, I inner width = H · K, R
total rank of the low-rank maps, U injection width = 3 I + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # conventional name

from implicit_blocks import Mixer, Window
from implicit_blocks.layers import Linear, at_least_float32
from implicit_blocks.mixers.short_conv import DocumentsAround, PaddingPermutation, permute
from implicit_blocks.mixers.slots import RecurrentSlots
from implicit_blocks_rwkv7.delta_rule import FASTEST_DECAY
from implicit_blocks_rwkv7.scan import DELTA_RULE
from implicit_blocks_rwkv7.spec import RWKV7Spec

SHIFT_POWERS = {"r": 0.2, "k": 0.7, "v": 0.7, "decay": 0.9, "rate": 0.9, "gate": 0.2}
"""Exponents of the initial share of the previous token over the channels, as published."""


class RWKV7State(NamedTuple):
    """The state after committed tokens: the last real token's input, (B, D), and S, (B, H, K, K).

    ``S`` is kept in float32 or better.
    """

    last_BD: Tensor
    S_BHKV: Tensor


class RWKV7Context(NamedTuple):
    """Whether the window starts a sequence, its padding and its documents, or None without them.

    Padding must not separate a token from the previous one. Therefore the real tokens of each row are moved
    to its front, and the result is moved back. All other fields refer to the permuted tokens.
    """

    begins: bool
    real: PaddingPermutation | None = None
    documents_BL: Tensor | None = None
    same_before_BL: Tensor | None = None  # whether the previous token belongs to the same document
    initial_document_B: Tensor | None = None


class RWKV7(Mixer):
    """A matrix state with decay per channel and corrections at a learned rate.

    With ``x_c`` the mixer's input interpolated with the previous token's, ``z_t + μ_c (z_{t−1} − z_t)``, and
    each projection with its part of the injection: ``r, k, v = W x + u``; ``log w = −e^{−1/2} σ(w_0 + W'
    tanh(W x + u))``; learning rate ``a = σ(a_0 + W' (W x + u))``; gate ``g = W' σ(W x + u)``; removal key
    ``κ̂ = k ⊙ ξ``, normalized in each head; replacement key ``k̃ = k ⊙ (1 + (a − 1) ⊙ α)``;

        ``S_t = (diag(w_t) − (a_t ⊙ κ̂_t) κ̂_tᵀ) S_{t−1} + k̃_t v_tᵀ``, ``o_t = S_tᵀ r_t``,

    ``y = W_o (g ⊙ (LayerNorm(o) + (r · (ρ ⊙ k̃)) v))``, norm and bonus per head. With
    ``negative_eigenvalues`` the correction is doubled, as in the paper's proofs of expressivity.

    Two departures from the paper: the first layer's values are not mixed into those of later layers, since a
    mixer does not know other layers; and the injection is added to the projections, not to their shifted
    input.

    Args:
        spec: heads, widths and ranks.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: RWKV7Spec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.spec, inner = spec, spec.inner_width
        self.shift = nn.ParameterDict({name: torch.empty(d_model) for name in SHIFT_POWERS})
        widths = (inner, inner, inner, spec.decay_rank, spec.rate_rank, spec.gate_rank)
        self.widths = dict(zip(SHIFT_POWERS, widths, strict=True))
        self.projections = nn.ModuleDict(
            {name: Linear(d_model, width, bias=False) for name, width in self.widths.items()}
        )
        self.decay_up = Linear(spec.decay_rank, inner, bias=False)
        self.rate_up = Linear(spec.rate_rank, inner, bias=False)
        self.gate_up = Linear(spec.gate_rank, inner, bias=False)
        self.w_0 = nn.Parameter(torch.empty(inner))
        self.a_0 = nn.Parameter(torch.empty(inner))
        self.xi = nn.Parameter(torch.empty(inner))
        self.alpha = nn.Parameter(torch.empty(inner))
        self.rho = nn.Parameter(torch.empty(inner))
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.norm_bias = nn.Parameter(torch.empty(inner))
        self.out_proj = Linear(inner, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the vectors as published for a first layer; ρ to 0."""
        with torch.no_grad():
            for name, power in SHIFT_POWERS.items():
                share = torch.arange(self.shift[name].numel()) / self.shift[name].numel()
                self.shift[name].copy_(1 - share.pow(power))
            places = torch.arange(self.w_0.numel()) / max(1, self.w_0.numel() - 1)
            self.w_0.copy_(-6.5 + 5 * places.pow(0.85))
            for vector, value in (
                (self.a_0, 0.0),
                (self.xi, 0.85),
                (self.alpha, 1.0),
                (self.rho, 0.0),
                (self.norm_weight, 1.0),
                (self.norm_bias, 0.0),
            ):
                vector.fill_(value)

    @property
    def injection_width(self) -> int:
        """Total width of r, k, v and the hidden layers of the low-rank maps."""
        return sum(self.widths.values())

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> RWKV7State:
        """Return zeros; the state's size does not depend on the number of tokens."""
        wide = torch.promote_types(dtype, torch.float32)
        shape = (batch_size, self.spec.n_heads, self.spec.head_dim, self.spec.head_dim)
        return RWKV7State(
            torch.zeros(batch_size, self.out_proj.out_features, device=device, dtype=wide),
            torch.zeros(shape, device=device, dtype=wide),
        )

    def select_rows(self, state: RWKV7State, rows: Tensor) -> RWKV7State:
        """Select rows of the state."""
        return RWKV7State(state.last_BD[rows], state.S_BHKV[rows])

    def slots(
        self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int
    ) -> RecurrentSlots:
        """Return one state per slot; its size does not depend on the length."""
        return RecurrentSlots(self, count, device=device, dtype=dtype)

    def prepare(self, window: Window) -> RWKV7Context:
        """Locate the last real token, and the documents around the window."""
        context: RWKV7Context = window.once(type(self), lambda: _context(window))
        return context

    def forward(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: RWKV7State, context: RWKV7Context
    ) -> Tensor:
        """Mix the window."""
        y, _ = self._mix(z_BLD, u_BLU, state, context)
        return y

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: RWKV7State, context: RWKV7Context
    ) -> tuple[Tensor, RWKV7State]:
        """Mix the window and return the state after it."""
        y, S = self._mix(z_BLD, u_BLU, state, context)
        if context.real is None:
            return y, RWKV7State(z_BLD[:, -1].clone(), S)
        front = permute(z_BLD, context.real.order_BL)
        inputs = torch.cat((state.last_BD[:, None].to(z_BLD.dtype), front), dim=1)
        rows = torch.arange(inputs.shape[0], device=inputs.device)
        return y, RWKV7State(inputs[rows, context.real.count_B], S)

    def _mix(
        self, z: Tensor, u: Tensor | None, state: RWKV7State, context: RWKV7Context
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if context.real is not None:
            z, u = permute(z, context.real.order_BL), permute(u, context.real.order_BL)
        projected = self._project(z, u, state, context)
        r, k, v = projected["r"], projected["k"], projected["v"]
        decay = at_least_float32(self.decay_up(torch.tanh(projected["decay"])))
        log_w = -FASTEST_DECAY * torch.sigmoid(decay + at_least_float32(self.w_0))
        rate = torch.sigmoid(at_least_float32(self.rate_up(projected["rate"])) + at_least_float32(self.a_0))
        gate = self.gate_up(torch.sigmoid(projected["gate"]))
        wide_k = at_least_float32(k)
        kappa = _unit(self._heads(wide_k * at_least_float32(self.xi)))
        key = wide_k * (1 + (rate - 1) * at_least_float32(self.alpha))
        correction = self._heads(rate) * kappa * (2.0 if spec.negative_eigenvalues else 1.0)
        if context.real is not None:  # padding has no input and leaves the state unchanged
            valid = context.real.valid_BL[:, :, None]
            key, log_w = key.where(valid, 0.0), log_w.where(valid, 0.0)
            correction = correction.where(valid[..., None], 0.0)
        heads_r, heads_k, heads_v = (self._heads(x) for x in (r, key, v))
        tensors = (heads_r, self._heads(log_w), heads_k, heads_v, -kappa, correction)
        before = None if context.begins else state.S_BHKV
        scan = DELTA_RULE.choose(spec.backend, *tensors, before, context.documents_BL)
        o, S = scan.run(
            *tensors,
            initial_state_BHKV=before,
            chunk_size=spec.chunk_size,
            documents_BL=context.documents_BL,
            initial_document_B=context.initial_document_B,
        )
        wide = at_least_float32(o)
        normed = F.layer_norm(wide, wide.shape[-1:], eps=spec.norm_eps * spec.head_dim).flatten(-2)
        normed = torch.addcmul(self.norm_bias.to(wide.dtype), normed, self.norm_weight.to(wide.dtype))
        bonus = (heads_r * self._heads(at_least_float32(self.rho)) * heads_k).sum(-1, keepdim=True) * heads_v
        y: Tensor = self.out_proj(gate * (normed + bonus.flatten(-2)))
        return (y if context.real is None else permute(y, context.real.inverse_BL)), S

    def _project(
        self, z: Tensor, u: Tensor | None, state: RWKV7State, context: RWKV7Context
    ) -> dict[str, Tensor]:
        """Return the projections of the shifted inputs, each with its part of the injection."""
        before = torch.cat((state.last_BD[:, None].to(z.dtype), z[:, :-1]), dim=1)
        if context.same_before_BL is not None:
            before = before.where(context.same_before_BL[:, :, None], 0.0)
        change = before - z
        injected = [None] * len(self.widths) if u is None else u.split(tuple(self.widths.values()), dim=-1)
        projected = {}
        for (name, projection), part in zip(self.projections.items(), injected, strict=True):
            shifted = torch.addcmul(z, change, self.shift[name].to(z.dtype))
            value: Tensor = projection(shifted)
            projected[name] = value if part is None else value + part
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.spec.n_heads, self.spec.head_dim))
        return heads

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the output projection."""
        return (self.out_proj,)


def _unit(x: Tensor) -> Tensor:
    """Normalize the last dimension; zeros stay zeros, and gradients are continuous."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _context(window: Window) -> RWKV7Context:
    begins, real = window.start == 0, window.real_first()
    documents, before, initial = DocumentsAround.of(window, taps=2, real=real)
    if documents is None or before is None:
        return RWKV7Context(begins, real)
    same = documents == torch.cat((before, documents[:, :-1]), dim=1)
    return RWKV7Context(begins, real, documents, same, initial)
