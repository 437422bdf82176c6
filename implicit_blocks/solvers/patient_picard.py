"""Picard iteration that reduces its damping when the residual stops decreasing.

The step is that of M. A. Krasnosel'skii (Uspekhi Mat. Nauk 10, 1955); the policy is that of learning-rate
schedules that reduce the rate on a plateau.

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.solution import difference, narrow, norm
from implicit_blocks.specs.base import require_count, require_share


class Patience(NamedTuple):
    """State of E elements: λ, the lowest residual so far, and the iterations since then."""

    damping_E: Tensor
    lowest_E: Tensor
    waited_E: Tensor


class PatientPicard(Solver):
    """``z ← (1 − λ) z + λ f(z)``; λ shrinks by ``factor`` after ``patience`` iterations without progress.

    Progress is a new lowest residual. Use it for maps that contract for most rows and overshoot for some:
    rows that contract keep the undamped step, which is the fastest for them, and the others reach the damping
    that they need, at least ``min_damping``. A row that overshoots loses ``patience`` iterations per
    reduction. With scope ``prefix`` the residual of a token may also stall because an earlier token has not
    converged, and its damping is then reduced without need; if tokens converge one after the other, use
    ``Picard``.

    Args:
        damping: λ of the first steps, in (0, 1].
        patience: iterations without a lower residual, at least 1.
        factor: in (0, 1).
        min_damping: the smallest λ, in (0, damping].

    Raises:
        ValueError: an argument is out of range.

    """

    def __init__(
        self, *, damping: float = 1.0, patience: int = 8, factor: float = 0.5, min_damping: float = 0.25
    ) -> None:
        require_share("damping", damping)
        require_count("patience", patience)
        if not 0 < factor < 1:
            raise ValueError(f"factor must be in (0, 1), got {factor}")
        if not 0 < min_damping <= damping:
            raise ValueError(f"min_damping must be in (0, {damping}], up to damping; got {min_damping}")
        self.damping, self.patience, self.factor, self.min_damping = damping, patience, factor, min_damping

    def init(self, z0_EF: Tensor) -> Patience:
        """Return the state before the first call: the initial λ and an infinite lowest residual."""
        elements = z0_EF.shape[:1]
        precision = torch.promote_types(z0_EF.dtype, torch.float32)
        return Patience(
            damping_E=z0_EF.new_full(elements, self.damping, dtype=precision),
            lowest_E=z0_EF.new_full(elements, torch.inf, dtype=precision),
            waited_E=z0_EF.new_zeros(elements, dtype=torch.int64),
        )

    def update(self, z_EF: Tensor, fz_EF: Tensor, state: Patience, f: Map) -> tuple[Tensor, Patience]:
        """Return the next point, a step towards ``f(z)`` with each element's λ, and the state."""
        residual = narrow(norm(difference(z_EF, fz_EF)), state.lowest_E.dtype).squeeze(1)
        lower = residual < state.lowest_E
        waited = torch.where(lower, 0, state.waited_E + 1)
        stalled = waited >= self.patience
        damping = torch.where(
            stalled, (state.damping_E * self.factor).clamp(min=self.min_damping), state.damping_E
        )
        lowest = torch.where(lower, residual, state.lowest_E)
        z = torch.lerp(z_EF, fz_EF, damping.to(z_EF.dtype)[:, None])
        return z, Patience(damping, lowest, torch.where(stalled, 0, waited))
