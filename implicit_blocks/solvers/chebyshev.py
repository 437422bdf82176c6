"""Picard iteration with a cycle of dampings, the roots of a Chebyshev polynomial.

L. F. Richardson, Phil. Trans. R. Soc. A 210, 1911 (dampings that vary); D. Young, "On Richardson's method for
solving linear systems with positive definite matrices", J. Math. Phys. 32, 1953 (the roots).

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from implicit_blocks._utils.validation import require_count
from implicit_blocks.interfaces import Map, Solver


class Chebyshev(Solver):
    """``z ← z + λ (f(z) − z)``, where λ runs through a cycle, and may exceed 1.

    For a map whose Jacobian has real eigenvalues μ between ``lowest`` and ``highest``, a cycle multiplies the
    error by ``Π (1 − λ (1 − μ))``; the dampings are those for which the largest of these factors is smallest.
    Use it for maps that overshoot along some directions (μ near −1) and contract slowly along others: one
    damping that suits the first slows down the second. Bounds that are too narrow let the search diverge.

    Args:
        lowest: the smallest eigenvalue; below ``highest``.
        highest: the largest eigenvalue, below 1.
        cycle: number of dampings; 1 is Picard iteration with the best single damping. Longer cycles converge
            faster, and have larger steps in between, which maps that are far from linear don't stand.

    Raises:
        ValueError: an argument is out of range.

    """

    differentiable = True

    def __init__(self, *, lowest: float = -0.95, highest: float = 0.8, cycle: int = 2) -> None:
        require_count("cycle", cycle)
        if not lowest < highest < 1:
            raise ValueError(f"lowest and highest must rise and be below 1, got {lowest} and {highest}")
        self.lowest, self.highest, self.cycle = lowest, highest, cycle
        self.dampings = chebyshev_dampings(lowest, highest, cycle)

    def init(self, z0_EF: Tensor) -> Tensor:
        """Return the place of each element in the cycle, (E,) uint8."""
        return z0_EF.new_zeros(z0_EF.shape[:1], dtype=torch.uint8)

    def update(self, z_EF: Tensor, fz_EF: Tensor, state: Tensor, f: Map) -> tuple[Tensor, Tensor]:
        """Return the next point and the elements' next places in the cycle."""
        precision = torch.promote_types(z_EF.dtype, torch.float32)
        damping_E = torch.full_like(state, self.dampings[-1], dtype=precision)
        for place, damping in enumerate(self.dampings[:-1]):  # no list is copied to the device
            damping_E = torch.where(state == place, damping, damping_E)
        return torch.lerp(z_EF, fz_EF, damping_E.to(z_EF.dtype)[:, None]), (state + 1) % self.cycle


def chebyshev_dampings(lowest: float, highest: float, cycle: int) -> tuple[float, ...]:
    """Return the dampings of a cycle: the smallest, the largest, the second smallest, and so on."""
    middle, half = 1 - (highest + lowest) / 2, (highest - lowest) / 2
    angles = [(2 * k + 1) * math.pi / (2 * cycle) for k in range(cycle)]
    rising = [1 / (middle + half * math.cos(angle)) for angle in angles]
    order = [end for k in range(cycle) for end in (k, cycle - 1 - k)]
    return tuple(rising[k] for k in dict.fromkeys(order))
