"""Vectors of 8-bit features with one scale per vector, for keys and values.

The largest feature is mapped to 127, so the error of each feature is at most 1/254 of it. For normally
distributed vectors of 64 features the relative error is 0.6 %; 8-bit floats with an equally good scale give
2.5 %, bfloat16 0.17 %.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
SMALLEST = 1e-30  # lower bound of the largest feature, so that zeros have a valid scale


class EightBits(NamedTuple):
    """``codes`` (…, P) int8 times ``scales`` (…) float32."""

    codes: Tensor
    scales: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized vectors."""
        return (self.codes * self.scales[..., None]).to(dtype)


def eight_bits(x: Tensor) -> EightBits:
    """Quantize vectors (…, P) to 8 bits per feature."""
    wide = x.float()
    scales = wide.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    codes = (wide / scales[..., None] + 0.5).floor().clamp(-LARGEST, LARGEST)
    return EightBits(codes.to(torch.int8), scales)
