"""A gated recurrence, as an example to replace by another mixer.

L. Feng et al., "Were RNNs All We Needed?", 2024 (the minimal GRU); W. D. Hillis and G. L. Steele, "Data
parallel algorithms", Communications of the ACM 29, 1986 (the scan).

Shape legend: B batch, L tokens of the window, T tokens so far, D model width, H memory width, U injection
width = 3 H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from implicit_blocks import Mixer, Window
from implicit_blocks.layers import Linear, at_least_float32
from implicit_blocks.mixers.slots import RecurrentSlots
from torch import Tensor, nn
from torch.nn.functional import silu

from implicit_blocks_template.spec import TemplateSpec


class Context(NamedTuple):
    """Masks (B, L, 1) bool: real tokens (None: all), and first tokens of a document (None: none)."""

    real_BL1: Tensor | None = None
    begins_BL1: Tensor | None = None


class Template(Mixer):
    """``h_t = k_t h_{t-1} + (1 - k_t) x_t``, ``y_t = W_out (h_t silu(g_t))``, with ``[x, k, g] = W z + u``.

    ``k = sigmoid(... + bias)`` is the fraction of the memory that a token keeps. The state is ``h`` after the
    last token, (B, H), in float32 or better. A window of L tokens costs log2(L) element-wise passes.

    Args:
        spec: width of the memory.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: TemplateSpec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.width = spec.expand * d_model
        self.in_proj = Linear(d_model, self.injection_width, bias=False)
        self.keep_bias = nn.Parameter(torch.empty(self.width))
        self.out_proj = Linear(self.width, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the features' memory spans between about 2 and 20 tokens."""
        nn.init.uniform_(self.keep_bias, 0.0, 3.0)

    @property
    def injection_width(self) -> int:
        """Total width of new value, keep gate and output gate."""
        return 3 * self.width

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the output projection."""
        return (self.out_proj,)

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> Tensor:
        """Return an empty memory, (B, H); its size does not depend on ``max_seq_len``."""
        wide = torch.promote_types(dtype, torch.float32)
        return torch.zeros(batch_size, self.width, device=device, dtype=wide)

    def select_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Return the memory of these rows."""
        return state[rows]

    def slots(
        self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int
    ) -> RecurrentSlots:
        """Return one memory per slot, for continuous batching."""
        return RecurrentSlots(self, count, device=device, dtype=dtype)

    def prepare(self, window: Window) -> Context:
        """Return the masks of padding and documents, computed once per window for all layers."""
        context: Context = window.once(Context, lambda: _context(window))
        return context

    def forward(self, z_BLD: Tensor, u_BLU: Tensor | None, state: Tensor, context: Context) -> Tensor:
        """Return the mixed window, (B, L, D)."""
        return self.advance(z_BLD, u_BLU, state, context)[0]

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed window and the memory after it, (B, H)."""
        projected = self.in_proj(z_BLD)
        projected = projected if u_BLU is None else projected + u_BLU
        x, keep, gate = projected.chunk(3, dim=-1)
        keep = torch.sigmoid(at_least_float32(keep) + at_least_float32(self.keep_bias))
        new = (1 - keep) * x
        if context.begins_BL1 is not None:
            keep = keep.where(~context.begins_BL1, 0.0)
        if context.real_BL1 is not None:  # padding leaves the memory unchanged
            keep, new = keep.where(context.real_BL1, 1.0), new.where(context.real_BL1, 0.0)
        h = scan(keep, new, state)
        y: Tensor = self.out_proj(h * silu(gate))
        return y, h[:, -1].clone()  # a view would keep the whole window in memory


def scan(keep_BLH: Tensor, new_BLH: Tensor, state_BH: Tensor) -> Tensor:
    """Return ``h_t = keep_t h_{t-1} + new_t`` for every t, (B, L, H), from ``h_0`` = ``state``."""
    first = new_BLH[:, :1] + keep_BLH[:, :1] * state_BH[:, None]
    keep, h = keep_BLH, torch.cat((first, new_BLH[:, 1:]), dim=1)
    step, length = 1, h.shape[1]
    while step < length:  # after each pass h_t includes the last 2 * step tokens
        h = torch.cat((h[:, :step], h[:, step:] + keep[:, step:] * h[:, :-step]), dim=1)
        keep = torch.cat((keep[:, :step], keep[:, step:] * keep[:, :-step]), dim=1)
        step *= 2
    return h


def _context(window: Window) -> Context:
    valid = window.valid_BT
    real = None if valid is None else valid[:, window.start :, None]
    documents = window.documents_BT
    if documents is None:
        return Context(real)
    if valid is None:
        valid = torch.ones_like(documents, dtype=torch.bool)
    # A document begins where the previous real token belongs to another one; padding may lie between them.
    place = torch.arange(documents.shape[1], device=documents.device)
    latest = torch.where(valid, place, -1).cummax(1).values
    before = torch.cat((latest.new_full((latest.shape[0], 1), -1), latest[:, :-1]), dim=1)
    other = documents.gather(1, before.clamp(min=0)) != documents
    return Context(real, (other & (before >= 0))[:, window.start :, None])
