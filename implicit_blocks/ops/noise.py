"""Counter-based random numbers: pure functions of a seed and counters, equal on every rank and device.

The hash is the output function of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). Counter-based generators keep no state (J. Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011): the noise of a token depends on its position and not on how its
sequence is divided into windows.

Shape legend: B batch, L tokens, W width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gumbel_at", "hash_counters", "keys_at", "normal_at", "sampled_normal", "uniform_at"]

MASK = (1 << 64) - 1
INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hash_counters(seed: int, *counters: int) -> int:
    """Return 64 random bits, a function of a seed and counters, on the host."""
    bits = _hash(seed & MASK)
    for counter in counters:
        bits = _hash((bits + counter) & MASK)
    return bits


def uniform_at(seed: int, *counters: int) -> float:
    """Return a number uniform in (0, 1), a function of a seed and counters, on the host."""
    return ((hash_counters(seed, *counters) >> 12) + 0.5) * 2.0**-52


def normal_at(
    positions_BL: Tensor, width: int, *, seed: int, truncation: float | None = None, dtype: torch.dtype
) -> Tensor:
    """Return normal noise (B, L, W) of mean 0, a function of seed, position and channel alone.

    The values are ``√2 erf⁻¹(u erf(c/√2))`` with u uniform in (−1, 1) and the truncation c. They are computed
    in float64 and then rounded: implementations of a function that differ in the last bit, such as the
    vectorized and the scalar one, then almost never give different values in narrower types. Equal rows of
    positions have equal noise. Nothing is read from the device, so that a CUDA graph may capture the call.

    Args:
        positions_BL: (B, L) int64, on the device of the result.
        width: number of channels W.
        seed: the noise of two seeds is independent.
        truncation: largest absolute value; None: unbounded. The standard deviation is 1 before truncation,
            0.987 after truncation at 3.
        dtype: type of the result.

    """
    of_position = _hash_tensor(positions_BL + _signed(hash_counters(seed, 0)))
    channels = torch.arange(width, device=positions_BL.device)
    of_channel = _hash_tensor(channels + _signed(hash_counters(seed, 1)))
    bits = _hash_tensor(of_position[..., None] + of_channel)
    symmetric = ((bits >> 11) * 2 + 1).double() * 2.0**-53  # odd multiples of 2^-53: never 0, 1 or -1
    return _normal(symmetric, truncation).to(dtype)


def keys_at(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return 64 random bits for each pair of a seed and a counter, int64.

    ``seeds`` and ``counters`` are int64 of any shapes that broadcast; the return value has their shape.
    """
    return _hash_tensor(_hash_tensor(seeds) + counters)


def gumbel_at(keys_E: Tensor, width: int) -> Tensor:
    """Return standard Gumbel noise (E, W) in float64, a function of each element's key and of the channel.

    Adding it to logarithms of probabilities and taking the largest entry draws from the distribution.
    """
    channels = torch.arange(width, device=keys_E.device)
    bits = _hash_tensor(keys_E[:, None] + _hash_tensor(channels))
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52  # never 0 or 1
    return uniform.log().neg_().log_().neg_()


def sampled_normal(
    shape: tuple[int, ...], *, truncation: float | None = None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return normal noise of mean 0 from torch's global generator of the device.

    Args:
        shape: shape of the noise.
        truncation: largest absolute value, as in ``normal_at``; None: unbounded.
        dtype: type of the result; the noise is sampled in float32, or in float64 for that type.
        device: the generator's device.

    """
    wide = torch.promote_types(dtype, torch.float32)
    if truncation is None:
        return torch.randn(shape, dtype=wide, device=device).to(dtype)
    symmetric = torch.rand(shape, dtype=wide, device=device) * 2 - 1
    return _normal(symmetric, truncation).clamp(-truncation, truncation).to(dtype)


def _normal(symmetric: Tensor, truncation: float | None) -> Tensor:
    """Map numbers uniform in (−1, 1) to normal ones by the inverse distribution function."""
    if truncation is not None:
        symmetric = symmetric * math.erf(truncation / math.sqrt(2))
    return torch.erfinv(symmetric) * math.sqrt(2)


def _hash(bits: int) -> int:
    bits = (bits + INCREMENT) & MASK
    bits = (bits ^ (bits >> 30)) * FIRST & MASK
    bits = (bits ^ (bits >> 27)) * SECOND & MASK
    return bits ^ (bits >> 31)


def _hash_tensor(bits: Tensor) -> Tensor:
    """Return ``_hash`` of int64 values, whose products wrap around as unsigned ones do."""
    bits = bits + _signed(INCREMENT)
    bits = (bits ^ _shifted(bits, 30)) * _signed(FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(SECOND)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift to the right and fill with zeros; the shift of a signed type copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    """Return 64 bits as the int64 value of the same bits."""
    return bits - (1 << 64) if bits >> 63 else bits
