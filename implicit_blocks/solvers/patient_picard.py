"""Picard iteration that takes shorter steps where longer ones have stopped helping.

The step is M. A. Krasnosel'skii's (Uspekhi Mat. Nauk 10, 1955); the policy is that of learning rates that are
lowered on a plateau.

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks._utils.validation import require_count, require_share
from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.ops.residual import difference, narrow, norm


class Patience(NamedTuple):
    """Of each of E elements: λ, the lowest residual so far, and the iterations since."""

    damping_E: Tensor
    lowest_E: Tensor
    waited_E: Tensor


class PatientPicard(Solver):
    """``z ← (1 − λ) z + λ f(z)``, λ smaller by ``factor`` after ``patience`` iterations without a new low.

    For maps of which most contract and some overshoot, row by row: the first keep the plain step, the fastest
    for them; the others find the damping that they need, down to ``min_damping``. A row that overshoots has
    lost the iterations waited for. With scope ``prefix`` a token may also wait because one before it has not
    settled, and is then slowed down for nothing; where tokens settle one after the other take ``Picard``.

    Args:
        damping: λ of the first steps, in (0, 1].
        patience: iterations without a lower residual, at least 1.
        factor: in (0, 1).
        min_damping: the smallest λ, in (0, damping].

    Raises:
        ValueError: a number out of its range.

    """

    def __init__(
        self, *, damping: float = 1.0, patience: int = 8, factor: float = 0.5, min_damping: float = 0.25
    ) -> None:
        require_share("damping", damping)
        require_count("patience", patience)
        if not 0 < factor < 1:
            raise ValueError(f"factor is {factor}; choose a number in (0, 1)")
        if not 0 < min_damping <= damping:
            raise ValueError(
                f"min_damping is {min_damping}; choose a number in (0, {damping}], up to the damping"
            )
        self.damping, self.patience, self.factor, self.min_damping = damping, patience, factor, min_damping

    def init(self, z0_EF: Tensor) -> Patience:
        """Return the first λ, and no residual yet."""
        elements = z0_EF.shape[:1]
        precision = torch.promote_types(z0_EF.dtype, torch.float32)
        return Patience(
            damping_E=z0_EF.new_full(elements, self.damping, dtype=precision),
            lowest_E=z0_EF.new_full(elements, torch.inf, dtype=precision),
            waited_E=z0_EF.new_zeros(elements, dtype=torch.int64),
        )

    def update(self, z_EF: Tensor, fz_EF: Tensor, state: Patience, f: Map) -> tuple[Tensor, Patience]:
        """Step towards ``f(z)``, as far as the element's λ says."""
        residual = narrow(norm(difference(z_EF, fz_EF)), state.lowest_E.dtype).squeeze(1)
        lower = residual < state.lowest_E
        waited = torch.where(lower, 0, state.waited_E + 1)
        tired = waited >= self.patience
        damping = torch.where(
            tired, (state.damping_E * self.factor).clamp(min=self.min_damping), state.damping_E
        )
        lowest = torch.where(lower, residual, state.lowest_E)
        z = torch.lerp(z_EF, fz_EF, damping.to(z_EF.dtype)[:, None])
        return z, Patience(damping, lowest, torch.where(tired, 0, waited))
