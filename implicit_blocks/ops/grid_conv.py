"""Convolution over the rows and columns of a board whose cells are the tokens of a sequence.

Token i is in row ``i // M`` and column ``i % M``; cells outside of the board are zeros. ``grid_conv`` is
torch's convolution of boards without padding. ``gathered_grid_conv``, its plain reference, collects the cells
under the kernel by their index, so that tokens may be anywhere in the row of a batch.

The weights are those of a linear map of all values under the kernel, tap by tap in reading order.

Shape legend: B batch, L tokens, D input width, C output channels, k size of the kernel, K = k² taps,
F = K · D values under the kernel, M columns of the board.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks._utils.padding import PaddingPermutation


def grid_conv(z_BLD: Tensor, weight_CF: Tensor, bias_C: Tensor | None, *, columns: int) -> Tensor:
    """Convolve boards in reading order, (B, L, D) to (B, L, C); the last row may be incomplete."""
    batch, length, width = z_BLD.shape
    rows, size = -(-length // columns), math.isqrt(weight_CF.shape[1] // width)
    if missing := rows * columns - length:
        z_BLD = F.pad(z_BLD, (0, 0, 0, missing))
    # Boards and kernels have their channels last in memory, the layout of the fast kernels on a GPU.
    board = z_BLD.reshape(batch, rows, columns, width).permute(0, 3, 1, 2)
    kernel = weight_CF.view(-1, size, size, width).permute(0, 3, 1, 2)
    mixed = F.conv2d(board, kernel, bias_C, padding=size // 2)
    return mixed.permute(0, 2, 3, 1).reshape(batch, rows * columns, -1)[:, :length]


def neighbors(
    positions_BL: Tensor, real: PaddingPermutation, *, columns: int | None, kernel_size: int
) -> Tensor:
    """Return the index of the token under each tap, (B, L, K) int64; L where there is none.

    Args:
        positions_BL: cell of each token, int64.
        real: moves the real tokens of each row to its front.
        columns: M; None: boards are square, with as many columns as each row's number of tokens requires.
        kernel_size: k, odd.

    """
    length = positions_BL.shape[1]
    count_B11 = real.count_B[:, None, None]
    if columns is None:
        width_B11 = count_B11.double().sqrt().ceil().long().clamp(min=1)
    else:
        width_B11 = torch.full_like(count_B11, columns)
    steps = torch.arange(kernel_size, device=positions_BL.device) - kernel_size // 2
    down_K, right_K = (part.flatten() for part in torch.meshgrid(steps, steps, indexing="ij"))
    column_BLK = positions_BL[:, :, None] % width_B11 + right_K
    cell_BLK = positions_BL[:, :, None] + down_K * width_B11 + right_K
    inside = (column_BLK >= 0) & (column_BLK < width_B11) & (cell_BLK >= 0) & (cell_BLK < count_B11)
    order_BLK = real.order_BL[:, :, None].expand(-1, -1, kernel_size**2)
    return torch.where(inside, order_BLK.gather(1, cell_BLK.clamp(0, length - 1)), length)


def gathered_grid_conv(
    z_BLD: Tensor, weight_CF: Tensor, bias_C: Tensor | None, neighbors_BLK: Tensor
) -> Tensor:
    """Convolve the tokens with those under each tap, (B, L, D) to (B, L, C); the index L is a zero."""
    batch, length, width = z_BLD.shape
    with_zero = F.pad(z_BLD, (0, 0, 0, 1))
    index = neighbors_BLK.flatten(1)[:, :, None].expand(-1, -1, width)
    return F.linear(with_zero.gather(1, index).view(batch, length, -1), weight_CF, bias_C)
