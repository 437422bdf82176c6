"""Anderson acceleration: extrapolate from the last few points to where the residual would vanish.

D. G. Anderson, "Iterative procedures for nonlinear integral equations", J. ACM 12, 1965; H. F. Walker and P.
Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49, 2011 (the difference form
used here).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks._utils.validation import require_count, require_share
from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.ops.residual import narrow, norm


class AndersonState(NamedTuple):
    """M past points of each of E elements; ``slots`` counts the points taken in."""

    values_EMF: Tensor  # f(z) at past points
    residuals_EMF: Tensor  # f(z) − z there
    slots_E: Tensor
    accepted_EF: Tensor  # f(z) of the last accepted point
    accepted_norm_E: Tensor  # its residual norm
    accelerated_E: Tensor  # whether the current point is an extrapolation


class Anderson(Solver):
    """Mix the last ``memory`` points with the newest so that the mixed residual is smallest.

    With ``g = f(z) − z``, newest point k and earlier points j, find ``γ = argmin ‖g_k + Σ γ_j (g_j − g_k)‖² +
    ρ ‖γ‖²`` and go to the same combination of ``f(z)``, stepping the fraction ``damping`` of the mixed
    residual. ρ is ``regularization`` times the mean diagonal of the Gram matrix of the differences, so that
    the choice does not depend on the scale of ``z``; the Gram matrix is formed in float32 or better and
    solved in float64.

    Safeguard, at no extra call: where the residual measured at an extrapolated point is larger than at the
    last accepted point, that point is dropped and the search goes on from the last accepted ``f(z)``, as
    Picard would.

    Its steps can be differentiated (``Unrolled``). The mixing weights have a derivative where the differences
    determine them, and none where rounding does: an element whose residual, or one of whose differences, is
    below the precision of ``f`` (that of autocast, where it is on) keeps them as constants, and one whose
    residual is below the precision of ``z`` is at rest, its derivative that of ``z``. The values are the same
    without gradients.

    Costs 2 · memory extra copies of ``z`` and about as many passes over them an iteration: for maps that are
    cheap beside their state, or that Picard solves in a handful of iterations, it does not pay. With scope
    ``sequence`` the mixing weights couple the tokens of a row, so that a token depends on later ones; with
    ``prefix`` each token mixes by itself.

    Args:
        memory: number of earlier points mixed with the newest, at least 1 (1 is the secant method).
        damping: in (0, 1].
        regularization: ρ relative to the Gram matrix, at least 0.

    Raises:
        ValueError: a number out of its range.

    """

    differentiable = True

    def __init__(self, *, memory: int = 5, damping: float = 1.0, regularization: float = 1e-6) -> None:
        require_count("memory", memory)
        require_share("damping", damping)
        if not 0 <= regularization < float("inf"):
            raise ValueError(f"regularization is {regularization}; choose 0 or more")
        self.memory, self.damping, self.regularization = memory, damping, regularization

    def init(self, z0_EF: Tensor) -> AndersonState:
        """Return an empty history, 2 · memory copies of ``z0``."""
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
        """Extrapolate, or fall back to the last accepted value."""
        residual = fz_EF - z_EF
        norm_E = narrow(norm(residual.detach()), state.accepted_norm_E.dtype).squeeze(1)
        rejected = state.accelerated_E & ~(norm_E <= state.accepted_norm_E)

        filled = torch.arange(self.memory, device=z_EF.device) < state.slots_E[:, None]
        mixed = self._mix(z_EF, fz_EF, residual, state, filled)
        # An extrapolation beyond the type's range: the plain step remains.
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
                # The derivative of weights that are rounding errors is a quotient of rounding errors.
                size, residual = _norm(fz_EF.to(precision)), _norm(g)
                smallest = _norm(differences).squeeze(2).where(filled_EM, torch.inf).amin(1, keepdim=True)
                undetermined = torch.minimum(residual, smallest) <= rounding_of_f * size
                basis = torch.where(undetermined[:, :, None], basis.detach(), basis)
                target = torch.where(undetermined, target.detach(), target)
            gram = (basis @ basis.mT).double()
            rhs = -(basis @ target[:, :, None]).double()
            diagonal = gram.diagonal(dim1=1, dim2=2)
            mean = diagonal.sum(1, keepdim=True) / filled_EM.sum(1, keepdim=True).clamp(min=1)
            tiny = torch.finfo(precision).tiny  # an element at rest has differences of 0: γ = 0 then
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
    """Return the norm of the last dimension, kept as 1, as a constant."""
    norm: Tensor = torch.linalg.vector_norm(values.detach(), dim=-1, keepdim=True)
    return norm
