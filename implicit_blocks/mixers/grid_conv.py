"""A gated convolution over a board, for puzzles whose cells are the tokens of a sequence.

A. Schwarzschild et al., "Can You Learn an Algorithm? Generalizing from Easy to Hard Problems with Recurrent
Networks", 2021; A. Bansal et al., "End-to-end Algorithm Synthesis with Recurrent Networks: Logical
Extrapolation Without Overthinking", 2022 (iterated convolutions that solve mazes). There the layers are plain
convolutions with ReLU; here the convolution is gated, as the linear layers of Y. N. Dauphin et al., "Language
Modeling with Gated Convolutional Networks", 2017.

Shape legend: B batch, L tokens of the window, D model width, E inner width, U = 2E injection width,
K = kernel_size² taps, M columns of the board.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.interfaces import Mixer
from implicit_blocks.layers import Linear
from implicit_blocks.mixers import GridConvSpec
from implicit_blocks.ops.grid_conv import gathered_grid_conv, grid_conv, neighbors
from implicit_blocks.windows import Window

REMEDY = (
    "mix each board as one window (no window_length, no commit_prefix, stopping scope 'sequence', no "
    "generation)"
)


class GridContext(NamedTuple):
    """The columns M of the board, or with padding the token under each tap, (B, L, K) int64."""

    columns: int
    neighbors_BLK: Tensor | None = None


class GridConv(Mixer):
    """``W_out (silu(a) · b)`` with ``a, b = conv(z) + u``: a gated convolution over a board.

    The tokens are the cells of a board in reading order, with M columns: token i is in row ``i // M``, column
    ``i % M``. Cells outside of the board are zeros. Padding does not count: the i-th real token is cell i,
    wherever it is in the row of the batch.

    A cell's output depends on cells after it, so the mixer needs the whole board as one window. There are no
    windows after committed tokens, no decoding and no packed documents. Do not use it for text.

    Args:
        spec: columns of the board, size of the kernel, inner width.
        d_model: width of the residual stream.

    """

    causal = False

    def __init__(self, spec: GridConvSpec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.columns, self.kernel_size = spec.columns, spec.kernel_size
        self.d_inner = spec.inner_width(d_model)
        # Its weight is that of a linear map of the K · D values under the kernel, and is cached like one.
        self.conv = Linear(spec.kernel_size**2 * d_model, 2 * self.d_inner, bias=spec.bias)
        self.out_proj = Linear(self.d_inner, d_model, bias=spec.bias)

    @property
    def injection_width(self) -> int:
        """Width of a and b together."""
        return 2 * self.d_inner

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> tuple[()]:
        """Return an empty state: nothing precedes a board."""
        return ()

    def select_rows(self, state: tuple[()], rows: Tensor) -> tuple[()]:
        """Return the empty state."""
        return ()

    def prepare(self, window: Window) -> GridContext:
        """Find the columns of the board, and with padding the neighbors of each cell.

        Raises:
            ValueError: the window follows committed tokens, or has packed documents.

        """
        if window.start > 0:
            raise ValueError(
                f"grid_conv cannot mix a window that follows {window.start} committed tokens, whose outputs "
                f"would depend on it; {REMEDY}"
            )
        if window.documents_BL is not None:
            raise ValueError(
                "grid_conv takes one board per row, and this row has packed documents; leave out documents"
            )
        columns = self.columns or math.isqrt(window.length - 1) + 1
        real = window.real_first()
        if real is None:
            return GridContext(columns)
        found = window.once(
            ("grid neighbors", self.columns, self.kernel_size),
            lambda: neighbors(window.positions_BL, real, columns=self.columns, kernel_size=self.kernel_size),
        )
        return GridContext(columns, found)

    def forward(self, z_BLD: Tensor, u_BLU: Tensor | None, state: tuple[()], context: GridContext) -> Tensor:
        """Mix the cells of each board."""
        weight, bias = self.conv.current()
        z_BLD = z_BLD.to(weight.dtype)
        if context.neighbors_BLK is None:
            h_BLU = grid_conv(z_BLD, weight, bias, columns=context.columns)
        else:
            h_BLU = gathered_grid_conv(z_BLD, weight, bias, context.neighbors_BLK)
        gate, value = (h_BLU if u_BLU is None else h_BLU + u_BLU).chunk(2, dim=-1)
        mixed: Tensor = self.out_proj(F.silu(gate) * value)
        return mixed

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: tuple[()], context: GridContext
    ) -> tuple[Tensor, tuple[()]]:
        """Mix the cells, and return the empty state."""
        return self(z_BLD, u_BLU, state, context), state

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the layer that writes into the residual stream."""
        return (self.out_proj,)
