"""Anderson acceleration: extrapolate from past points to a point with the smallest linearized residual.

D. G. Anderson, "Iterative procedures for nonlinear integral equations", J. ACM 12, 1965; H. F. Walker and P.
Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49, 2011 (the difference form
used here).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.solution import narrow, norm
from implicit_blocks.specs.base import require_count, require_share


class AndersonState(NamedTuple):
    """The last M points of E elements; ``slots`` counts the points stored so far."""

    values_EMF: Tensor  # f(z) at past points
    residuals_EMF: Tensor  # f(z) − z there
    slots_E: Tensor
    accepted_EF: Tensor  # f(z) of the last accepted point
    accepted_norm_E: Tensor  # its residual norm
    accelerated_E: Tensor  # whether the current point is an extrapolation


class Anderson(Solver):
    """Combine the newest point with the last ``memory`` points so that the combined residual is smallest.

    With ``g = f(z) − z``, newest point k and earlier points j, compute ``γ = argmin ‖g_k + Σ γ_j (g_j −
    g_k)‖² + ρ ‖γ‖²``. The next point is the same combination of the ``f(z)``; with ``damping`` < 1 only that
    fraction of the combined residual is added to the combined z. ρ is ``regularization`` times the mean
    diagonal of the Gram matrix of the differences, so that it does not depend on the scale of ``z``. The Gram
    matrix is computed in float32 or better and solved in float64.

    Safeguard, without extra calls: if the residual at an extrapolated point is larger than at the last
    accepted point, the point is rejected and the search continues from the last accepted ``f(z)``, as with
    Picard.

    The steps are differentiable (``Unrolled``). The weights γ are differentiated only if the differences
    determine them, not rounding errors: they are constants for an element whose residual, or one of whose
    differences, is below the precision of ``f`` (that of autocast, if enabled). An element whose residual is
    below the precision of ``z`` has the derivative of ``z``. The values are the same without gradients.

    Costs 2 · memory extra copies of ``z`` and about as many passes over them per iteration. Do not use it for
    maps that are cheap compared to their state, or that Picard solves in a few iterations. With scope
    ``sequence`` the weights couple the tokens of a row, so that a token depends on later ones; with
    ``prefix`` each token has its own weights.

    Args:
        memory: number of past points combined with the newest, at least 1 (1 is the secant method).
        damping: in (0, 1].
        regularization: ρ relative to the Gram matrix, at least 0.

    Raises:
        ValueError: an argument is out of range.

    """

    differentiable = True

    def __init__(self, *, memory: int = 5, damping: float = 1.0, regularization: float = 1e-6) -> None:
        require_count("memory", memory)
        require_share("damping", damping)
        if not 0 <= regularization < float("inf"):
            raise ValueError(f"regularization must be at least 0 and finite, got {regularization}")
        self.memory, self.damping, self.regularization = memory, damping, regularization

    def init(self, z0_EF: Tensor) -> AndersonState:
        """Return an empty history with room for 2 · memory copies of ``z0``."""
        elements, features = z0_EF.shape
        history = z0_EF.new_zeros(elements, self.memory, features)
        return AndersonState(
            values_EMF=history,
            residuals_EMF=history,
            slots_E=z0_EF.new_zeros(elements, dtype=torch.int64),
            accepted_EF=torch.zeros_like(z0_EF),
            accepted_norm_E=z0_EF.new_full(
                (elements,), torch.inf, dtype=torch.promote_types(z0_EF.dtype, torch.float32)
            ),
            accelerated_E=z0_EF.new_zeros(elements, dtype=torch.bool),
        )

    def update(
        self, z_EF: Tensor, fz_EF: Tensor, state: AndersonState, f: Map
    ) -> tuple[Tensor, AndersonState]:
        """Return the extrapolated point, or the last accepted value, and the state."""
        residual = fz_EF - z_EF
        norm_E = narrow(norm(residual.detach()), state.accepted_norm_E.dtype).squeeze(1)
        rejected = state.accelerated_E & ~(norm_E <= state.accepted_norm_E)

        filled = torch.arange(self.memory, device=z_EF.device) < state.slots_E[:, None]
        mixed = self._mix(z_EF, fz_EF, residual, state, filled)
        # An extrapolation beyond the type's range is replaced by the undamped Picard step.
        mixed = torch.where(mixed.detach().isfinite().all(1)[:, None], mixed, fz_EF)

        newest = torch.arange(self.memory, device=z_EF.device) == (state.slots_E % self.memory)[:, None]
        write = (newest & ~rejected[:, None])[:, :, None]
        keep = rejected[:, None]
        return torch.where(keep, state.accepted_EF, mixed), AndersonState(
            values_EMF=torch.where(write, fz_EF[:, None], state.values_EMF),
            residuals_EMF=torch.where(write, residual[:, None], state.residuals_EMF),
            slots_E=state.slots_E + ~rejected,
            accepted_EF=torch.where(keep, state.accepted_EF, fz_EF),
            accepted_norm_E=torch.where(rejected, state.accepted_norm_E, norm_E),
            accelerated_E=~rejected & (state.slots_E > 0),
        )

    def _mix(
        self, z_EF: Tensor, fz_EF: Tensor, residual_EF: Tensor, state: AndersonState, filled_EM: Tensor
    ) -> Tensor:
        precision = state.accepted_norm_E.dtype
        rounding = rounding_of_f = torch.finfo(z_EF.dtype).eps
        if torch.is_autocast_enabled(device := z_EF.device.type):
            rounding_of_f = max(rounding, torch.finfo(torch.get_autocast_dtype(device)).eps)
        with torch.autocast(z_EF.device.type, enabled=False):
            g = residual_EF.to(precision)
            differences = (state.residuals_EMF.to(precision) - g[:, None]) * filled_EM[:, :, None]
            basis, target = differences, g
            if differentiated := torch.is_grad_enabled() and differences.requires_grad:
                # Weights determined by rounding errors have meaningless derivatives.
                size, residual = _norm(fz_EF.to(precision)), _norm(g)
                smallest = _norm(differences).squeeze(2).where(filled_EM, torch.inf).amin(1, keepdim=True)
                undetermined = torch.minimum(residual, smallest) <= rounding_of_f * size
                basis = torch.where(undetermined[:, :, None], basis.detach(), basis)
                target = torch.where(undetermined, target.detach(), target)
            gram = (basis @ basis.mT).double()
            rhs = -(basis @ target[:, :, None]).double()
            diagonal = gram.diagonal(dim1=1, dim2=2)
            mean = diagonal.sum(1, keepdim=True) / filled_EM.sum(1, keepdim=True).clamp(min=1)
            tiny = torch.finfo(precision).tiny  # a converged element has differences of 0; then γ = 0
            ridge = torch.where(filled_EM, self.regularization * mean + tiny, 1.0)
            weights, _ = torch.linalg.solve_ex(gram + torch.diag_embed(ridge), rhs)
            weights = weights.squeeze(2)
            usable = weights.isfinite().all(1, keepdim=True)
            weights = torch.where(usable & filled_EM, weights, 0.0).to(precision)
            newest = 1 - weights.sum(1, keepdim=True)
            value = newest * fz_EF + torch.bmm(weights[:, None], state.values_EMF.to(precision)).squeeze(1)
            if self.damping < 1:
                mixed = g + torch.bmm(weights[:, None], differences).squeeze(1)
                value = value - (1 - self.damping) * mixed
            if differentiated:
                at_rest = residual <= rounding * size
                value = torch.where(at_rest, value.detach() + (z_EF - z_EF.detach()), value)
        return value.to(z_EF.dtype)


def _norm(values: Tensor) -> Tensor:
    """Return the norm over the last dimension, kept with size 1, detached."""
    norm: Tensor = torch.linalg.vector_norm(values.detach(), dim=-1, keepdim=True)
    return norm
