"""Gradients of unrolled Anderson steps, including many steps past convergence.

Shape legend: S seeds (each a row of the batch with its own map), F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import implicit_blocks as ib

SEEDS = 300


@dataclass
class Problems:
    """Maps ``tanh(W z + x)`` with W and x per seed; the loss is a weighted sum of z."""

    parameters: Tensor  # (S, F, F + 1): W and x
    loss_weight: Tensor  # (S, F)
    autocast: bool = False

    @classmethod
    def drawn(cls, *, size: float, width: int, dtype: torch.dtype, autocast: bool = False) -> Problems:
        """Draw the problems; ``size`` is the norm of W."""
        drawn = torch.randn(SEEDS, width, width + 2, generator=torch.Generator().manual_seed(0)).double()
        weight, x, loss_weight = drawn.split([width, 1, 1], dim=2)
        weight = size * weight / torch.linalg.matrix_norm(weight, 2, keepdim=True)
        return cls(torch.cat([weight, x], 2).to(dtype), loss_weight.squeeze(2).to(dtype), autocast)

    def solved(self, solver: ib.Solver, steps: int, parameters: Tensor) -> ib.Solution:
        weight, x = parameters[:, :, :-1], parameters[:, :, -1]
        layer = ib.FixedPoint(
            lambda z, x: torch.tanh((weight @ z[:, :, None]).squeeze(2) + x),
            solver=solver,
            gradient=ib.Unrolled(steps=steps),
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            solution: ib.Solution = layer(x, torch.zeros_like(x))
        return solution

    def losses(self, solver: ib.Solver, steps: int, parameters: Tensor) -> Tensor:
        return (self.solved(solver, steps, parameters).z * self.loss_weight).sum(1)

    def gradients(self, solver: ib.Solver, steps: int) -> Tensor:
        """Return the gradients, (S, F, F + 1), in float64."""
        parameters = self.parameters.clone().requires_grad_()
        (found,) = torch.autograd.grad(self.losses(solver, steps, parameters).sum(), parameters)
        return found.double()

    def slopes(self, solver: ib.Solver, steps: int, directions: Tensor, step: float = 1e-6) -> Tensor:
        """Return the slope of each loss along its direction, (S,), by finite differences in float64."""
        middle, double = self.parameters.double(), Problems(self.parameters, self.loss_weight.double())
        ends = [
            double.losses(solver, steps, (middle + sign * step * directions).requires_grad_()).detach()
            for sign in (1, -1)
        ]
        return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("width", [5, 8, 16])
@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [(torch.float32, False, 1e-4), (torch.float64, False, 1e-7), (torch.float32, True, 0.2)],
    ids=["float32", "float64", "autocast"],
)
def test_anderson_gradients_stay_exact_past_convergence(
    dtype: torch.dtype, autocast: bool, bound: float, width: int
) -> None:
    """Each of 300 gradients is compared with finite differences along itself, where excess length shows."""
    problems, solver = (
        Problems.drawn(size=0.5, width=width, dtype=dtype, autocast=autocast),
        ib.Anderson(memory=3),
    )
    found = problems.gradients(solver, 24)
    lengths = found.flatten(1).norm(dim=1)
    slopes = problems.slopes(solver, 24, found / lengths[:, None, None])
    assert ((lengths - slopes).abs() / slopes.abs()).max() < bound


@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("size", [0.5, 0.95, 2.0])
def test_anderson_gradients_are_exact_in_random_directions(size: float, damping: float) -> None:
    """With more memory than features, including maps on which Picard does not converge."""
    problems, solver = (
        Problems.drawn(size=size, width=3, dtype=torch.float64),
        ib.Anderson(memory=5, damping=damping),
    )
    found = problems.gradients(solver, 60)
    directions = torch.randn_like(found)
    error = (found * directions).flatten(1).sum(1) - problems.slopes(solver, 60, directions)
    error = error.abs() / found.flatten(1).norm(dim=1).clamp(min=1)
    # Some steps with ‖W‖ = 2 do not converge; there differences of 1e-6 lead to other points.
    converged = problems.solved(solver, 60, problems.parameters.requires_grad_()).residual < 1e-10
    assert converged.sum() >= (SEEDS if size < 1 else 0.9 * SEEDS)
    assert error[converged].max() < 1e-6


def test_repeated_residuals_keep_the_anderson_gradient() -> None:
    """A map with few distinct values repeats its residuals, so the Gram matrix of differences is 0."""
    x = torch.tensor([[0.3, -0.2]], requires_grad=True)
    layer = ib.FixedPoint(
        lambda z, x: x + (0.5 * z).bfloat16().float(),
        solver=ib.Anderson(memory=3),
        gradient=ib.Unrolled(steps=30),
    )
    (gradient,) = torch.autograd.grad(layer(x).z.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 2.0), rtol=2e-2, atol=0)


def test_anderson_values_are_equal_with_and_without_autograd() -> None:
    x, rule, points = torch.randn(4, 8), ib.Anderson(memory=3), []
    for differentiated in (True, False):
        z = torch.zeros(4, 8, requires_grad=differentiated)
        state = rule.init(z)
        with torch.set_grad_enabled(differentiated):
            for _ in range(24):
                fz = torch.tanh(0.5 * z.roll(1, 1) + x)
                z, state = rule.update(z, fz, state, torch.tanh)
        points.append(z.detach())
    assert torch.equal(*points)
