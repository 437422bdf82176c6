"""Distributions of random depths: draws from uniform numbers, and means. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

Uniform = Callable[[], float]
"""Returns the next number, uniform in (0, 1), of a stream."""

LARGEST_MEAN = 65_536
"""Upper bound of the mean of a random depth; drawing takes time proportional to the mean."""

_PIECE = 256.0  # exp(-rate) is far from underflow
_STEP, _NODES = 0.1, 60  # nodes of the trapezoidal rule: ±6 standard deviations


def draw_poisson(rate: float, uniform: Uniform) -> int:
    """Return a Poisson number by inversion of the distribution function.

    A sum of Poisson numbers is a Poisson number, so that large rates are divided into pieces.
    """
    total = 0
    while rate > _PIECE:
        total += _invert_poisson(_PIECE, uniform())
        rate -= _PIECE
    return total + _invert_poisson(rate, uniform())


def _invert_poisson(rate: float, u: float) -> int:
    count, term = 0, math.exp(-rate)
    below = term
    # The second condition ends the sum where rounding keeps it below u.
    while u > below and (count <= rate or below + term > below):
        count += 1
        term *= rate / count
        below += term
    return count


def draw_log_normal(log_mean: float, sigma: float, uniform: Uniform) -> float:
    """Return ``exp`` of a normal number of this mean and standard deviation."""
    return math.exp(log_mean + sigma * NormalDist().inv_cdf(uniform()))


def mean_of_clamped_poisson(rate: float, low: int, high: int | None) -> float:
    """Return the mean of ``min(max(N, low), high)``, N a Poisson number; ``high`` None: unbounded.

    ``E max(N, m) = rate + Σ_{k<m} (m − k) P(N = k)``, and ``E max(N − h, 0) = E max(N, h) − h``.
    """
    mean = _mean_above(rate, low)
    return mean if high is None else mean - (_mean_above(rate, high) - high)


def _mean_above(rate: float, low: int) -> float:
    """Return the mean of ``max(N, low)``."""
    if rate == 0:
        return float(low)
    spread = 12 * math.sqrt(rate) + 40  # the probability of numbers farther from the mean is below 1e-16
    if low > rate + spread:
        return float(low)
    first = max(0, math.floor(rate - spread))
    return rate + sum((low - k) * _probability(rate, k) for k in range(first, low))


def _probability(rate: float, count: int) -> float:
    return math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))


@lru_cache(maxsize=64)
def mean_of_log_normal_poisson(mean: float, sigma: float, maximum: int | None) -> float:
    """Return the mean of ``min(N + 1, maximum)``, N Poisson with a log-normal rate of this mean."""
    if maximum is None:
        return mean + 1
    log_mean = math.log(mean) - sigma**2 / 2
    total = weights = 0.0
    for node in range(-_NODES, _NODES + 1):
        x = node * _STEP
        weight = math.exp(-(x**2) / 2)
        total += weight * mean_of_clamped_poisson(math.exp(log_mean + sigma * x), 0, maximum - 1)
        weights += weight
    return 1 + total / weights
