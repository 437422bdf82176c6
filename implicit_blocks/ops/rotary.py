"""Rotary positions: J. Su et al., "RoFormer", 2021.

Shape legend: B batch, L tokens, H heads, P head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotation_tables"]


def rotation_tables(
    positions_BL: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles ``position · theta^(−2i / P)``, each (B, 1, L, P / 2).

    Args:
        positions_BL: (1 or B, L) positions in their sequence.
        head_dim: head width P, even.
        theta: base of the wavelengths.
        dtype: of the tables; the angles are computed in float64, so that far positions stay exact.

    """
    half = head_dim // 2
    exponent = torch.arange(half, device=positions_BL.device, dtype=torch.float64) / half
    angles = positions_BL[:, None, :, None] * theta**-exponent
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHLP: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature i of each head with feature i + P/2 by its token's angle; in the wider of both types."""
    first, second = x_BHLP.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
