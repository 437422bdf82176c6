"""A penalty on the Jacobian at the fixed point, for use with another gradient estimator.

S. Bai, V. Koltun and J. Z. Kolter, "Stabilizing Equilibrium Models by Jacobian Regularization", ICML 2021;
the estimate: M. F. Hutchinson, Commun. Stat. Simul. Comput. 18, 1989.

Shape legend: B batch, L tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from implicit_blocks.gradients.diverged import replace_diverged, restore_diverged
from implicit_blocks.gradients.phantom import Phantom
from implicit_blocks.gradients.unrolled import Unrolled
from implicit_blocks.interfaces import GradientEstimator, Map, SearchLike
from implicit_blocks.search.loop import still_at_padding
from implicit_blocks.solution import Solution, narrow, norm
from implicit_blocks.specs.base import require_count, require_part


class JacobianPenalty(GradientEstimator):
    """Use another gradient estimator, and add ``weight · ‖J‖²_F / d`` to the solution's ``penalty``.

    ``J = ∂f/∂z`` at the point that the other estimator returned, which is a constant; d is the number of
    features of a row without padding. A smaller Jacobian makes the search shorter and the model less
    expressive: with too large a weight the model becomes an explicit one. The trainer adds the penalty's mean
    over the rows to the loss; elsewhere add it yourself:
    ``(output.loss + output.solution.penalty.mean()).backward()``.

    ``‖J‖²_F`` is estimated as the mean of ``‖J v‖²`` over random signs v (Hutchinson), and ``J v`` as a
    central difference of f along v. Its error is proportional to the square of ``step``, and it needs first
    derivatives only, so that it works for every mixer and kernel. In bfloat16 the rounding of f adds to it:
    expect a floor near ``(0.004 / step)²``.

    Calls of ``f``: the other estimator's and ``2 · probes``, all of them differentiated.

    Args:
        gradient: the gradient of the fixed point; phantom with its defaults.
        weight: above 0.
        probes: number of random directions, at least 1.
        step: length of the difference in each feature, relative to the row's root mean square.

    Raises:
        ValueError: a number out of its range; a gradient of another type, or one without a fixed point.

    """

    def __init__(
        self,
        *,
        gradient: GradientEstimator | None = None,
        weight: float = 0.1,
        probes: int = 1,
        step: float = 1e-2,
    ) -> None:
        require_part("gradient", gradient, GradientEstimator, such_as="Phantom(steps=4)")
        if isinstance(gradient, Unrolled):
            raise ValueError(
                f"gradient {gradient!r} ends after a fixed number of steps, but the penalty needs the "
                "Jacobian at a fixed point; give Phantom or ImplicitFunction"
            )
        require_count("probes", probes)
        for name, value in (("weight", weight), ("step", step)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}; choose a number above 0")
        self.gradient = gradient if gradient is not None else Phantom()
        self.weight, self.probes, self.step = weight, probes, step
        self.searches, self.retains_graph = self.gradient.searches, self.gradient.retains_graph

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Solve with the other estimator, and estimate the Jacobian at its point."""
        solution = self.gradient(f, z0, search)
        z, valid, partial = solution.z.detach(), search.valid, solution.some_diverged()
        if partial:
            f, rows = replace_diverged(f, z0, solution)
            z, valid = z[rows], None if valid is None else valid[rows]
        size = jacobian_size(f, z, valid=valid, probes=self.probes, step=self.step)
        if partial:
            size = restore_diverged(size, torch.zeros_like(size), solution)
        penalty = self.weight * size
        if solution.penalty is not None:
            penalty = penalty + solution.penalty
        return replace(solution, penalty=penalty)


def jacobian_size(
    f: Map, z: Tensor, *, valid: Tensor | None = None, probes: int = 1, step: float = 1e-2
) -> Tensor:
    """Estimate ``‖∂f/∂z‖²_F / d`` of each row, (B,), from random signs and central differences.

    Unbiased up to the error of the differences; the relative standard deviation is about
    ``√(2 / (d · probes))`` for a Jacobian without structure. Draws from torch's default generator;
    differentiable in the parameters of ``f``.

    Args:
        f: the map, each row from its own row.
        z: the point, (B, …).
        valid: (B, L) bool, False at padding, which is left out.
        probes: number of random directions.
        step: length of the difference in each feature, relative to the row's root mean square.

    """
    shape = (-1, *[1] * (z.ndim - 1))
    real = torch.ones_like(z, dtype=torch.bool)
    if valid is not None:
        real = real & valid.view(*valid.shape, *[1] * (z.ndim - 2))
    features = real.flatten(1).sum(1).clamp(min=1)
    precision = torch.promote_types(z.dtype, torch.float32)
    scale = narrow(norm((z * real).flatten(1)).squeeze(1) / features.sqrt(), precision)
    length = step * torch.where(scale > 0, scale, 1.0).to(precision)
    total = z.new_zeros(z.shape[0], dtype=precision)
    for _ in range(probes):
        signs = (torch.randint(0, 2, z.shape, device=z.device) * 2 - 1).to(z.dtype) * real
        move = length.view(shape).to(z.dtype) * signs
        ahead, behind = (still_at_padding(f(point), z, valid) for point in (z + move, z - move))
        slope = (ahead.to(precision) - behind.to(precision)).flatten(1) / (2 * length[:, None])
        total = total + slope.square().sum(1)
    return total / (probes * features)
