"""Rotary position embedding: J. Su et al., "RoFormer", 2021.

Shape legend: B batch, L tokens, H heads, P head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from implicit_blocks.specs import RopeScaling

__all__ = ["rotate", "rotation_tables", "scaled_frequencies"]


def rotation_tables(
    positions_BL: Tensor,
    *,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles ``position · theta^(−2i / P)``, each (B, 1, L, P / 2).

    Args:
        positions_BL: (1 or B, L), positions in their sequence.
        head_dim: head width P, even.
        theta: base of the wavelengths.
        dtype: of the tables; angles are computed in float64, so that large positions are exact.
        scaling: scaling of the frequencies ``theta^(−2i / P)``; None: unscaled.

    """
    half = head_dim // 2
    exponent = torch.arange(half, device=positions_BL.device, dtype=torch.float64) / half
    frequencies = theta**-exponent
    if scaling is not None:
        frequencies = scaled_frequencies(frequencies, scaling)
    angles = positions_BL[:, None, :, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the scaled frequencies (P / 2,), in radians per token, for long texts.

    ``linear`` divides all by the factor (position interpolation: S. Chen et al., 2023). ``llama3`` divides
    those whose wavelength exceeds the original length / low_freq_factor, keeps those whose wavelength is
    below the original length / high_freq_factor, and interpolates in between (Llama 3.1).
    """
    lowered = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return lowered
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * lowered + kept * frequencies


def rotate(x_BHLP: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature i of each head with feature i + P/2 by its token's angle, in the wider of both types.

    Returns the type of ``x``, in memory token by token: attention writes its output as it finds its queries,
    and the projection after it reads tokens. Each half is cast separately: a compiler would write a
    concatenation to memory.
    """
    first, second = x_BHLP.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([half.to(x_BHLP.dtype).transpose(1, 2) for half in turned], dim=-1).transpose(1, 2)
