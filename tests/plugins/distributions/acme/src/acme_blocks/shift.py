"""A mixer that passes each token to a later one; shapes: B batch, L tokens, D model width, S distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

import implicit_blocks as ib
from acme_blocks import ShiftSpec
from implicit_blocks.layers import Linear


class ShiftContext(NamedTuple):
    """Indices of real tokens and their inverse, (B, L), and of the last real tokens, (B, S)."""

    order: Tensor | None = None
    inverse: Tensor | None = None
    last: Tensor | None = None


class Shift(ib.Mixer):
    """``y_t = W silu(x_t + x_{t−S})``, ``x = V z + u``; the state is the last S values of x, first zeros."""

    def __init__(self, spec: ShiftSpec, *, d_model: int) -> None:
        super().__init__()
        self.distance, self.d_model = spec.distance, d_model
        self.in_proj = Linear(d_model, d_model, bias=False)
        self.out_proj = Linear(d_model, d_model, bias=False)

    @property
    def injection_width(self) -> int:
        """Return the width of the model."""
        return self.d_model

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> Tensor:
        """Zeros."""
        return torch.zeros(batch_size, self.distance, self.d_model, device=device, dtype=dtype)

    def select_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Select rows of the state."""
        return state[rows]

    def prepare(self, window: ib.Window) -> ShiftContext:
        """Move padding to the end of each row, because distances count real tokens."""
        if window.documents_BT is not None:
            raise ValueError("acme.shift does not keep documents apart; give one document a row")
        if window.valid_BL is None:
            return ShiftContext()
        order = (~window.valid_BL).to(torch.int8).argsort(dim=1, stable=True)
        slots = torch.arange(self.distance, device=window.device)
        return ShiftContext(order, order.argsort(1), window.valid_BL.sum(1, keepdim=True) + slots)

    def forward(self, z_BLD: Tensor, u_BLU: Tensor | None, state: Tensor, context: ShiftContext) -> Tensor:
        """Mix the window."""
        return self.advance(z_BLD, u_BLU, state, context)[0]

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: Tensor, context: ShiftContext
    ) -> tuple[Tensor, Tensor]:
        """Mix the window and keep its last values."""
        x = self.in_proj(z_BLD)
        x = x if u_BLU is None else x + u_BLU
        x = x if context.order is None else _take(x, context.order)
        line = torch.cat((state.to(x.dtype), x), dim=1)
        y = self.out_proj(silu(x + line[:, : x.shape[1]]))
        y = y if context.inverse is None else _take(y, context.inverse)
        last = line[:, -self.distance :].clone() if context.last is None else _take(line, context.last)
        return y, last


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
