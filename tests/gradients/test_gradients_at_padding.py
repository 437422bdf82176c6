"""Adjoint gradients of padded sequences: padding is a constant."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib

VALID = torch.tensor([[True, True, True, True], [False, True, True, False]])


@pytest.mark.parametrize("gradient", [ib.ImplicitFunction(), ib.OneStepAdjoint()], ids=["exact", "one-step"])
def test_a_gradient_that_arrives_at_padding_changes_nothing(gradient: ib.GradientEstimator) -> None:
    """Also where the map expands at padding, so that an adjoint there would diverge."""
    slope = torch.where(VALID, 0.5, 3.0).double()[..., None]
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 2 * 4 * 3, dtype=torch.float64).view(2, 4, 3).requires_grad_()

    def gradients(at_padding: float) -> tuple[torch.Tensor, ...]:
        solution = ib.solve_fixed_point(
            lambda z: slope * z + weight * x,
            torch.zeros_like(x),
            gradient=gradient,
            solver=ib.Picard(),
            stopping=ib.Stopping(tolerance=1e-12, max_iterations=100),
            valid=VALID,
        )
        assert bool((solution.z[~VALID] == 0).all())  # its start
        upstream = torch.where(VALID, 1.0, at_padding).double()[..., None]
        return torch.autograd.grad((upstream * solution.z).sum(), (weight, x))

    expected = gradients(0.0)
    for found, wanted in zip(gradients(7.0), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert bool((expected[1][~VALID] == 0).all())
