"""Limited-memory Broyden's method: Newton steps with an inverse Jacobian estimated from past steps.

C. G. Broyden, "A class of methods for solving nonlinear simultaneous equations", Math. Comp. 19, 1965 (the
"good" update); the inverse kept as rank-one terms: R. H. Byrd, J. Nocedal and R. B. Schnabel,
"Representations of quasi-Newton matrices and their use in limited memory methods", Math. Programming 63,
1994; for implicit layers: S. Bai, J. Z. Kolter and V. Koltun, "Deep Equilibrium Models", NeurIPS 2019.

Shape legend: E elements of a search, F features of an element, M terms of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.solution import narrow, norm
from implicit_blocks.specs.base import require_count

GROWTH = 100.0
"""The memory is cleared when the residual exceeds the lowest one by this factor. Broyden's residuals increase
temporarily: with 2 instead of 100, a contraction by 0.98 took 513 iterations instead of 43; with 10, one by
0.999 took 252 instead of 78."""


class BroydenState(NamedTuple):
    """The inverse Jacobian of ``f(z) − z``, ``−I + Σ u vᵀ``, and the last accepted point, for E elements."""

    left_EMF: Tensor  # u
    right_EMF: Tensor  # v
    terms_E: Tensor  # number of terms in use, at most M
    point_EF: Tensor  # z of the last accepted point
    value_EF: Tensor  # f(z) there
    lowest_E: Tensor  # the lowest residual norm since the memory was cleared
    begun_E: Tensor  # whether an accepted point exists
    bold_E: Tensor  # whether the current point was computed with a non-empty memory


class Broyden(Solver):
    """Step to the root of a linear model of ``g(z) = f(z) − z`` that is updated after every step.

    With the step ``s`` and the change ``y`` of g along it, the inverse Jacobian B becomes ``B + (s − B y) sᵀB
    / sᵀB y``, the nearest matrix that is consistent with the step. The next point is ``z − B g``. B is
    initialized with ``−I``, so that the first step is Picard's. When ``memory`` terms are in use, the memory
    is cleared.

    Safeguard, without extra calls: if the residual at a point computed with a non-empty memory exceeds 100
    times the lowest residual since the memory was cleared, or is not finite, the point is rejected, the
    memory is cleared, and the search continues from the last accepted ``f(z)``, as with Picard. Dot products
    are computed in float32 or better.

    Costs 2 · memory + 2 extra copies of ``z``. Unlike Picard, it does not require ``f`` to be a contraction:
    near a fixed point, with sufficient memory, it converges for any Jacobian without the eigenvalue 1. It has
    no advantage where Picard needs only a few iterations. With scope ``sequence`` a step couples the tokens
    of a row, so that a token depends on later ones; with ``prefix`` each token has its own memory.

    Args:
        memory: maximum number of rank-one terms, at least 1.

    Raises:
        ValueError: memory is less than 1.

    """

    differentiable = True

    def __init__(self, *, memory: int = 10) -> None:
        require_count("memory", memory)
        self.memory = memory

    def init(self, z0_EF: Tensor) -> BroydenState:
        """Return an empty memory with room for 2 · memory + 2 copies of ``z0``."""
        elements, features = z0_EF.shape
        terms = z0_EF.new_zeros(elements, self.memory, features)
        no = z0_EF.new_zeros(elements, dtype=torch.bool)
        precision = torch.promote_types(z0_EF.dtype, torch.float32)
        return BroydenState(
            left_EMF=terms,
            right_EMF=terms,
            terms_E=z0_EF.new_zeros(elements, dtype=torch.int64),
            point_EF=torch.zeros_like(z0_EF),
            value_EF=torch.zeros_like(z0_EF),
            lowest_E=z0_EF.new_full((elements,), torch.inf, dtype=precision),
            begun_E=no,
            bold_E=no,
        )

    def update(self, z_EF: Tensor, fz_EF: Tensor, state: BroydenState, f: Map) -> tuple[Tensor, BroydenState]:
        """Update B with the last step; return the next point, or the last accepted value, and the state."""
        with torch.autocast(z_EF.device.type, enabled=False):
            return self._update(z_EF, fz_EF, state)

    def _update(self, z_EF: Tensor, fz_EF: Tensor, state: BroydenState) -> tuple[Tensor, BroydenState]:
        precision = state.lowest_E.dtype
        z, fz = z_EF.to(precision), fz_EF.to(precision)
        residual = fz - z
        norm_E = narrow(norm(residual.detach()), precision).squeeze(1)
        rejected = state.bold_E & ~(norm_E <= GROWTH * state.lowest_E)

        full = state.terms_E >= self.memory
        terms = torch.where(full, 0, state.terms_E)
        filled = (torch.arange(self.memory, device=z.device) < terms[:, None])[:, :, None]
        left = torch.where(filled, state.left_EMF.to(precision), 0.0)
        right = torch.where(filled, state.right_EMF.to(precision), 0.0)

        step = z - state.point_EF.to(precision)
        change = residual - (state.value_EF.to(precision) - state.point_EF.to(precision))
        along = _apply(left, right, change)  # B y
        across = _apply(right, left, step)  # Bᵀ s
        explained = (across * change).sum(1)  # sᵀ B y
        scale = torch.linalg.vector_norm(across.detach(), dim=1) * torch.linalg.vector_norm(
            change.detach(), dim=1
        )
        # A step without change of g, or with sᵀB y near 0, does not update B.
        usable = state.begun_E & ~rejected & (explained.detach().abs() > 1e-6 * scale)
        u = (step - along) / torch.where(usable, explained, 1.0)[:, None]
        usable = usable & u.detach().isfinite().all(1) & across.detach().isfinite().all(1)

        newest = (torch.arange(self.memory, device=z.device) == terms[:, None]) & usable[:, None]
        left = torch.where(newest[:, :, None], u[:, None], left)
        right = torch.where(newest[:, :, None], across[:, None], right)
        proposed = (z - _apply(left, right, residual)).to(z_EF.dtype)
        # Values beyond the type's range: return f(z), so that the search detects the divergence.
        proposed = torch.where(proposed.detach().isfinite().all(1)[:, None], proposed, fz_EF)

        keep = rejected[:, None]
        terms = torch.where(rejected, 0, terms + usable)
        lowest = torch.where(state.bold_E, torch.minimum(norm_E, state.lowest_E), norm_E)
        return torch.where(keep, state.value_EF, proposed), BroydenState(
            left_EMF=left.to(z_EF.dtype),
            right_EMF=right.to(z_EF.dtype),
            terms_E=terms,
            point_EF=torch.where(keep, state.point_EF, z_EF),
            value_EF=torch.where(keep, state.value_EF, fz_EF),
            lowest_E=torch.where(rejected, state.lowest_E, lowest),
            begun_E=~rejected,
            bold_E=terms > 0,
        )


def _apply(left_EMF: Tensor, right_EMF: Tensor, vector_EF: Tensor) -> Tensor:
    """Return ``(−I + Σ u vᵀ) x`` for u in ``left``, v in ``right``; its transpose with the two exchanged."""
    weights = torch.bmm(right_EMF, vector_EF[:, :, None])
    return torch.bmm(left_EMF.mT, weights).squeeze(2) - vector_EF
