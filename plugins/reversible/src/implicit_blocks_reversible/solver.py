"""The reversible iteration as an update rule.

S. McCallum, K. Arora and J. Foster, "Reversible Deep Equilibrium Models", 2025, iterate two coupled
sequences,

    ``y_{n+1} = (1 − β) y_n + β f(z_n)``,   ``z_{n+1} = (1 − β) z_n + β f(y_{n+1})``.

Interleaved as ``p = z_0, y_1, z_1, y_2, …`` after ``p_{−1} = y_0 = z_0``, they form one sequence with one
rule, ``p_{m+1} = (1 − β) p_{m−1} + β f(p_m)``: each call of ``f`` is a step, and ``p_{m−1} = (p_{m+1} − β
f(p_m)) / (1 − β)`` undoes a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks import Map, Solver


def step(previous: Tensor, fz: Tensor, damping: float) -> Tensor:
    """Return ``p_{m+1}`` in float64, given ``p_{m−1}`` in float64 and ``f(p_m)``."""
    return (1 - damping) * previous + damping * fz.to(torch.float64)


def undo(following: Tensor, fz: Tensor, damping: float) -> Tensor:
    """Return ``p_{m−1}`` in float64, given ``p_{m+1}`` in float64 and ``f(p_m)``."""
    return (following - damping * fz.to(torch.float64)) / (1 - damping)


class Reversible(Solver):
    """``p_{m+1} = (1 − β) p_{m−1} + β f(p_m)``: two points in float64, for any type of ``z``.

    An eigenvalue λ of f's Jacobian becomes two eigenvalues of the iteration, the roots of ``r² = (1 − β) + β
    λ r``: it converges for every real λ in (−1, 1), and for imaginary ones beyond 1, but never faster than
    √(1 − β) per call. It is intended for gradients that undo its steps (``ReversibleGradient``); otherwise
    Picard or Anderson need fewer calls.

    Args:
        damping: β in (0, 1).

    """

    differentiable = True

    def __init__(self, *, damping: float = 0.5) -> None:
        if not 0 < damping < 1:
            raise ValueError(f"damping must be in (0, 1), got {damping}")
        self.damping = damping

    def init(self, z0_EF: Tensor) -> tuple[Tensor, Tensor]:
        """Return two copies of the first point in float64, one as the point before it."""
        start = z0_EF.to(torch.float64)
        return start, start

    def update(
        self, z_EF: Tensor, fz_EF: Tensor, state: tuple[Tensor, Tensor], f: Map
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Step from the previous point towards ``f`` of the last point."""
        previous, current = state
        following = step(previous, fz_EF, self.damping)
        return following.to(z_EF.dtype), (current, following)
