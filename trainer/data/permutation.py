"""A memory-free random permutation of n samples: a Feistel network with cycle walking.

`permute` is a bijection on range(n) for every key and can be evaluated at any positions: a billion samples
are shuffled without a table, and a resumed run continues anywhere. Black and Rogaway, "Ciphers with Arbitrary
Finite Domains" (CT-RSA 2002), methods 2 and 3; the round function is the finalizer of SplitMix64 (Steele et
al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). It shuffles training data and is not a
secure cipher; for a handful of samples it reaches only some of the permutations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permute(positions: npt.NDArray[np.int64], n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the images of `positions`, each in range(n), under the permutation of this seed and epoch.

    Args:
        positions: one-dimensional, int64.
        n: number of samples, 1 to 2^62.
        seed: 0 to 2^64 - 1.
        epoch: 0 or greater; every epoch has a different permutation.

    """
    # Two halves of equal width; their product covers n and is below 4 n.
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    result = positions.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        walked = _feistel(result[pending], half, keys)
        result[pending] = walked
        pending = pending[walked >= n]
    return result.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int) -> list[int]:
    """Return one 64-bit key per round, by SplitMix64 from seed and epoch."""
    state = int(_mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))[0])
    state = (state + epoch * 0xD1B54A32D192ED03) & _MASK
    states = [(state + (i + 1) * _GOLDEN) & _MASK for i in range(_ROUNDS)]
    return [int(key) for key in _mix(np.array(states, dtype=np.uint64))]
