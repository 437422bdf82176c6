"""Picard iteration: the next point is ``f(z)``, or a damped step towards it.

É. Picard, "Mémoire sur la théorie des équations aux dérivées partielles et la méthode des approximations
successives", J. Math. Pures Appl. 6, 1890; damped: M. A. Krasnosel'skii, Uspekhi Mat. Nauk 10, 1955.

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.specs.base import require_share


class Picard(Solver):
    """``z ← (1 − λ) z + λ f(z)``.

    Converges if ``f`` is a contraction, and with damping λ < 1 also if ``f`` overshoots (eigenvalues of its
    Jacobian near −1 or complex). Keeps no state besides the point. For slow contractions (eigenvalues near 1)
    Anderson needs far fewer iterations.

    Args:
        damping: λ in (0, 1]; 1 is the undamped step to ``f(z)``.
        undamped_first: take the first step undamped, so that an initial point of zero has no influence on
            the iterates, as the published implementation does when it unrolls.

    Raises:
        ValueError: the damping is not in (0, 1].

    """

    differentiable = True

    def __init__(self, *, damping: float = 1.0, undamped_first: bool = False) -> None:
        require_share("damping", damping)
        self.damping = damping
        self.undamped_first = undamped_first and damping < 1

    def init(self, z0_EF: Tensor) -> tuple[Tensor, ...]:
        """Return an empty state, or one flag per element: whether its first step is still to be taken."""
        return (z0_EF.new_ones(z0_EF.shape[0], dtype=torch.bool),) if self.undamped_first else ()

    def update(
        self, z_EF: Tensor, fz_EF: Tensor, state: tuple[Tensor, ...], f: Map
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the next point, a step towards ``f(z)``, and the state."""
        if self.damping == 1:
            return fz_EF, state
        damped = torch.lerp(z_EF, fz_EF, self.damping)
        if not self.undamped_first:
            return damped, state
        (first,) = state
        return torch.where(first[:, None], fz_EF, damped), (torch.zeros_like(first),)
