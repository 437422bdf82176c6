"""The second difference of the iterates: a token leaves once its steps hardly change.

F. Pappone, D. Crisostomi and E. Rodolà, "Two-Scale Latent Dynamics for Recurrent-Depth Transformers", 2025
(arXiv 2509.23314).

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.exits.exit import UNDECIDED, Exit
from implicit_blocks.solution import difference, norm


class Steps(NamedTuple):
    """The step ``z − z_before`` that led to the next point, and whether there was one."""

    point_EF: Tensor
    known_E: Tensor


class SecondDifferenceExit(Exit):
    """``‖(f(z) − z) − (z − z_before)‖ / ‖f(z)‖``, with the point of the call before.

    It falls below the residual where an iteration approaches its limit in small steps of one direction, which
    change the predictions little, and stays above it where iterates turn or oscillate. It therefore leaves
    slow contractions earlier than the residual does; do not use it where the fixed point itself is needed, as
    for implicit gradients. Cannot be met by the first call. Keeps one copy of the points.

    Args:
        tolerance: largest second difference at which a token leaves, above 0.

    Raises:
        ValueError: the tolerance is not positive.

    """

    def __init__(self, *, tolerance: float = 0.01) -> None:
        if not 0 < tolerance < float("inf"):
            raise ValueError(f"tolerance is {tolerance}; choose a number above 0")
        self.tolerance = self.threshold = tolerance

    def init(self, z_EF: Tensor) -> Steps:
        """Return the state before the first call: no step is known."""
        return Steps(z_EF, torch.zeros_like(z_EF[:, 0], dtype=torch.bool))

    def measure(self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: Steps) -> tuple[Tensor, Steps]:
        """Return the relative norm of the second difference, and the point as the one before the next."""
        turn = norm(difference(z_EF, fz_EF) - difference(state.point_EF, z_EF))
        size = norm(fz_EF)
        relative = turn / size.clamp(min=torch.finfo(size.dtype).tiny)
        measure = relative.masked_fill(~state.known_E[:, None], UNDECIDED)
        return measure, Steps(z_EF, torch.ones_like(state.known_E))
