"""Gradient ``one_step_adjoint`` against its formula in float64."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import GRADIENT_CONTRACTS
from implicit_blocks.testing.gradients import Problem, inputs, upstream, weighted

STOPPING = ib.Stopping(tolerance=1e-3, max_iterations=50)


def expected(problem, x, z, ratio):
    """Return the gradients of the weight and of x: those of ``f`` at z with the cotangent u, row by row."""
    weight, rows = torch.zeros_like(problem.weight), []
    for row in range(x.shape[0]):
        zi, xi = z[row].detach(), x[row].detach().requires_grad_()
        jacobian = torch.autograd.functional.jacobian(lambda v, xi=xi: problem.map(v[None], xi[None])[0], zi)
        v = upstream(z)[row]
        step = v @ jacobian
        if ratio is not None and step.norm() > ratio * v.norm():
            step = step * ratio * v.norm() / step.norm()
        of_weight, of_x = torch.autograd.grad(
            problem.map(zi[None], xi[None])[0], (problem.weight, xi), v + step
        )
        weight += of_weight
        rows.append(of_x)
    return weight, torch.stack(rows)


@pytest.mark.parametrize("ratio", [None, 0.05, 0.2, 10.0])
def test_the_gradient_is_its_formula_at_the_value_of_the_search(ratio):
    problem, x = Problem(ib.OneStepAdjoint(max_norm_ratio=ratio), solver=None, stopping=STOPPING), inputs()
    solution = problem(x)
    with torch.no_grad():
        assert torch.equal(solution.z, problem(x).z)
    found = torch.autograd.grad(weighted(solution.z), (problem.weight, x))
    for one, other in zip(found, expected(problem, x, solution.z, ratio), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_limit_rescales_the_step_of_a_row_alone():
    """With ``f(z) = c z`` the gradient of z in the loss's own units is ``1 + min(c, ratio)``."""
    scale = torch.tensor([0.9, 0.1], dtype=torch.float64).view(2, 1)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    layer = ib.FixedPoint(
        lambda z, x: scale * z + x,
        gradient=ib.OneStepAdjoint(max_norm_ratio=0.5),
        stopping=ib.Stopping(tolerance=1e-6, max_iterations=500),
    )
    layer(x).z.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.5] * 3, [1.1] * 3], dtype=torch.float64))


@pytest.mark.parametrize("contract", [name for name in GRADIENT_CONTRACTS if name != "ddp"])
def test_the_gradient_satisfies_the_contract(contract):
    def two_terms(jacobian):
        return torch.eye(len(jacobian), dtype=jacobian.dtype) + jacobian

    GRADIENT_CONTRACTS[contract](ib.OneStepAdjointSpec(), oracle=two_terms)


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
def test_a_row_that_diverges_has_no_gradient_and_the_others_keep_theirs():
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)

    def f(z, x):
        broken = torch.tensor([1.0, torch.nan, 1.0], dtype=torch.float64).view(3, 1)
        return (weight * z + x) * torch.where(z.detach() > 1.4, broken, 1.0)

    stopping = ib.Stopping(tolerance=1e-9, max_iterations=100)
    solution = ib.FixedPoint(f, gradient=ib.OneStepAdjoint(), stopping=stopping)(x)
    assert solution.diverged.tolist() == [False, True, False]
    assert solution.z.isfinite().all()
    solution.z.sum().backward()
    assert weight.grad.isfinite()
    assert weight.grad > 0
    torch.testing.assert_close(x.grad[[0, 2]], torch.full((2, 2), 1.5, dtype=torch.float64))
    assert not x.grad[1].any()


def test_a_map_that_ignores_its_point_has_the_gradient_of_its_value():
    x = torch.ones(2, 3, requires_grad=True)
    solution = ib.FixedPoint(lambda z, x: torch.sin(x), gradient=ib.OneStepAdjoint())(x)
    solution.z.sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(torch.ones(2, 3)))


def test_a_map_without_parameters_has_its_value():
    solution = ib.FixedPoint(lambda z, x: torch.ones_like(z), gradient=ib.OneStepAdjoint())(torch.ones(2, 3))
    assert torch.equal(solution.z, torch.ones(2, 3))


def test_second_derivatives_are_refused():
    problem, x = Problem(ib.OneStepAdjoint(), solver=None, stopping=STOPPING), inputs()
    with pytest.raises(RuntimeError, match="OneStepAdjoint has no second derivatives"):
        torch.autograd.grad(weighted(problem(x).z), x, create_graph=True)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_positive_is_refused(ratio):
    with pytest.raises(ValueError, match="max_norm_ratio must be positive"):
        ib.OneStepAdjoint(max_norm_ratio=ratio)
    with pytest.raises(SpecError, match="max_norm_ratio"):
        ib.OneStepAdjointSpec(max_norm_ratio=ratio)


def test_the_spec_counts_a_differentiated_call_and_one_product():
    spec = ib.OneStepAdjointSpec()
    assert spec.forward_equivalents(6) == 10
    assert spec.differentiated_calls == spec.differentiated_calls_of(6) == 1
