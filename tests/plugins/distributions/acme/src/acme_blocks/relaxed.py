"""Dynamic relaxation: B. M. Irons and R. C. Tuck, "A version of the Aitken accelerator", 1969."""

from __future__ import annotations

import torch
from torch import Tensor

import implicit_blocks as ib


class Relaxed(ib.Solver):
    """``z ← z + ω r`` with ``r = f(z) − z`` and ``ω ← −ω r₀·(r − r₀) / ‖r − r₀‖²``, an ω for each element."""

    def __init__(self, *, first: float = 0.8, least: float = 0.1, most: float = 2.0) -> None:
        self.first, self.least, self.most = first, least, most

    def init(self, z0_EF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state with the initial ω and no residual."""
        wide = torch.promote_types(z0_EF.dtype, torch.float32)
        elements = z0_EF.shape[0]
        return (
            z0_EF.new_zeros(z0_EF.shape, dtype=wide),
            z0_EF.new_full((elements,), self.first, dtype=wide),
            z0_EF.new_zeros(elements, dtype=torch.bool),
        )

    def update(
        self, z_EF: Tensor, fz_EF: Tensor, state: tuple[Tensor, Tensor, Tensor], f: ib.Map
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Step along the residual."""
        before, omega, known = state
        residual = (fz_EF - z_EF).to(before.dtype)
        change = residual - before
        scale = change.square().sum(1)
        usable = known & (scale > 0)
        adapted = -omega * (before * change).sum(1) / torch.where(usable, scale, 1.0)
        omega = torch.where(usable, adapted.clamp(self.least, self.most), omega)
        z = (z_EF.to(before.dtype) + omega[:, None] * residual).to(z_EF.dtype)
        return z, (residual, omega, torch.ones_like(known))
