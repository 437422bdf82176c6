"""Gradient estimators against their formulas, in float64, and under autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.gradients import jacobian_free

ROWS, WIDTH = 3, 5
TIGHT = ib.Stopping(tolerance=1e-13, max_iterations=500)


def problem(seed=0, rate=0.3):
    """Return a nonlinear contraction f(z, x; W), its parameters and its input."""
    torch.manual_seed(seed)
    weight = nn.Parameter(rate * torch.linalg.qr(torch.randn(WIDTH, WIDTH).double())[0])
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)

    def f(z, x):
        return torch.tanh(z @ weight.T + x) + 0.3 * torch.sin(x * z)

    return f, weight, x


def jacobians(f, z, x, weight):
    """Return dense ∂f/∂z, ∂f/∂x and ∂f/∂W of each row at z."""
    dz, dx, dw = [], [], []
    for row in range(ROWS):
        zi, xi = z[row].detach(), x[row].detach()
        dz.append(torch.autograd.functional.jacobian(lambda v, xi=xi: f(v[None], xi[None])[0], zi))
        dx.append(torch.autograd.functional.jacobian(lambda v, zi=zi: f(zi[None], v[None])[0], xi))
        out = f(zi[None], xi[None])[0]
        dw.append(torch.stack([torch.autograd.grad(o, weight, retain_graph=True)[0] for o in out]))
    return torch.stack(dz), torch.stack(dx), torch.stack(dw)


def upstream(z):
    """Return the gradient of ``weighted`` in z."""
    return torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(9))


def weighted(z):
    return (z * upstream(z)).sum()


def expected_gradients(f, z, x, weight, series):
    """Return ``g · series(∂f/∂z) · ∂f/∂·``, summed over rows for W and per row for x."""
    dz, dx, dw = jacobians(f, z, x, weight)
    adjoint = torch.stack([upstream(z)[row] @ series(dz[row]) for row in range(ROWS)])
    return torch.einsum("bi,bijk->jk", adjoint, dw), torch.einsum("bi,bij->bj", adjoint, dx)


@pytest.mark.parametrize("backward", [ib.Picard(), ib.Picard(damping=0.7), ib.Anderson()])
@pytest.mark.parametrize("forward", [ib.Picard(), ib.Anderson()])
def test_implicit_function_gradient_is_the_dense_inverse(forward, backward):
    f, weight, x = problem()
    layer = ib.FixedPoint(
        f, solver=forward, gradient=ib.ImplicitFunction(solver=backward, stopping=TIGHT), stopping=TIGHT
    )
    solution = layer(x)
    weighted(solution.z).backward()
    eye = torch.eye(WIDTH, dtype=torch.float64)
    dw, dx = expected_gradients(f, solution.z, x, weight, lambda j: torch.linalg.inv(eye - j))
    torch.testing.assert_close(weight.grad, dw, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(x.grad, dx, atol=1e-10, rtol=1e-9)
    report = solution.adjoint.solution
    assert report.converged.all()
    assert (report.residual <= 1e-13).all()
    assert (report.iterations > 1).all()


def test_implicit_function_gradient_equals_finite_differences():
    f, weight, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)
    assert torch.autograd.gradcheck(lambda x, w: layer(x).z, (x, weight))


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.8), (4, 0.8), (6, 0.5)])
def test_phantom_gradient_is_its_formula(steps, damping):
    """λ ∂f/∂θ Σ_{i<k} (λ ∂f/∂z + (1 − λ) I)^i, at a point so accurate that the steps do not change it."""
    f, weight, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.Phantom(steps=steps, damping=damping), stopping=TIGHT)
    solution = layer(x)
    weighted(solution.z).backward()

    def series(jacobian):
        eye = torch.eye(WIDTH, dtype=torch.float64)
        step = damping * jacobian + (1 - damping) * eye
        return damping * sum(torch.linalg.matrix_power(step, i) for i in range(steps))

    dw, dx = expected_gradients(f, solution.z, x, weight, series)
    torch.testing.assert_close(weight.grad, dw, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(x.grad, dx, atol=1e-10, rtol=1e-9)


def test_jacobian_free_is_one_undamped_phantom_step():
    preset = jacobian_free()
    assert (type(preset), preset.steps, preset.damping) == (ib.Phantom, 1, 1.0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "solver", [ib.Picard(), ib.Picard(damping=0.8, undamped_first=True), ib.Anderson(memory=2)]
)
def test_unrolled_gradient_equals_finite_differences(solver, checkpointing):
    f, weight, x = problem()
    layer = ib.FixedPoint(f, solver=solver, gradient=ib.Unrolled(steps=4, checkpointing=checkpointing))
    assert torch.autograd.gradcheck(lambda x, w: layer(x).z, (x, weight))


def test_unrolled_takes_the_steps_of_the_solver():
    f, _, x = problem()
    layer = ib.FixedPoint(
        f, solver=ib.Picard(damping=0.8, undamped_first=True), gradient=ib.Unrolled(steps=3)
    )
    z = f(torch.zeros_like(x), x)
    for _ in range(2):
        z = 0.2 * z + 0.8 * f(z, x)
    solution = layer(x)
    torch.testing.assert_close(solution.z, z)
    assert (solution.iterations == 3).all()


def test_checkpointed_unrolled_memory_grows_by_z_per_step():
    """Each further step keeps z, not the activations of f."""
    x = torch.randn(8, 16)
    net = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 16))

    def saved(steps, checkpointing):
        layer = ib.FixedPoint(
            lambda z, x: net(z) + x, gradient=ib.Unrolled(steps=steps, checkpointing=checkpointing)
        )
        total, seen = 0, set()

        def pack(tensor):
            nonlocal total
            if tensor.data_ptr() not in seen and not isinstance(tensor, nn.Parameter):
                seen.add(tensor.data_ptr())
                total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(x)
        del out
        return total

    grown = saved(12, True) - saved(4, True)
    assert grown <= 8 * 3 * x.numel()
    assert saved(12, False) - saved(4, False) > 50 * grown / 3


def test_unrolled_refuses_a_solver_that_is_not_differentiable():
    class Opaque(ib.Picard):
        differentiable = False

    f, _, x = problem()
    with pytest.raises(ValueError, match="not declared differentiable"):
        ib.FixedPoint(f, solver=Opaque(), gradient=ib.Unrolled())(x)


@pytest.mark.parametrize(
    "solver", [ib.Picard(damping=0.8), ib.Anderson(memory=2)], ids=["picard", "anderson"]
)
def test_padding_enters_no_unrolled_step(solver):
    """Anderson mixes a whole row, in which padding must have no weight."""
    offset = torch.randn(2, 5, 3, dtype=torch.float64)
    valid = torch.tensor([[True] * 5, [False, False, True, True, True]])

    def search(valid=None):
        return ib.Search(solver=solver, stopping=ib.Stopping(), valid=valid)

    def f(z, offset):
        return torch.sin(z) * torch.linspace(0.2, 0.9, 3, dtype=z.dtype) + offset

    whole = ib.Unrolled(steps=6)(lambda z: f(z, offset), torch.zeros_like(offset), search(valid))
    alone = offset[1:, 2:]
    expected = ib.Unrolled(steps=6)(lambda z: f(z, alone), torch.zeros_like(alone), search())
    torch.testing.assert_close(whole.z[1:, 2:], expected.z, atol=1e-10, rtol=0)
    torch.testing.assert_close(whole.residual[1:], expected.residual)


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
def test_two_solves_before_one_backward_have_the_sum_of_their_gradients():
    f, weight, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)
    first, second = layer(x), layer(2 * x)
    (weighted(first.z) + 3 * weighted(second.z)).backward()
    together = weight.grad.clone()
    weight.grad = None
    weighted(layer(x).z).backward()
    (3 * weighted(layer(2 * x).z)).backward()
    torch.testing.assert_close(together, weight.grad)
    assert first.adjoint.solution is not second.adjoint.solution


def test_the_adjoint_solution_is_that_of_the_latest_backward_pass():
    f, _, x = problem()
    solution = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)(x)
    assert solution.adjoint.solution is None
    loss = weighted(solution.z)
    loss.backward(retain_graph=True)
    first = solution.adjoint.solution
    (2 * loss).backward()
    torch.testing.assert_close(solution.adjoint.solution.z, 2 * first.z)


def test_the_gradient_flows_through_consecutive_solves():
    f, weight, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)
    assert torch.autograd.gradcheck(lambda x, w: layer(layer(x).z).z, (x, weight))


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
@pytest.mark.parametrize("gradient", [ib.Phantom(), ib.Unrolled(), ib.ImplicitFunction()])
def test_gradients_under_autocast_are_close_to_float32(gradient):
    torch.manual_seed(0)
    linear = nn.Linear(16, 16)
    with torch.no_grad():
        linear.weight *= 0.4
    layer = ib.FixedPoint(lambda z, x: torch.tanh(linear(z) + x), gradient=gradient)
    exact = copy.deepcopy(linear)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).z.square().mean().backward()
    found = linear.weight.grad
    assert found.dtype == torch.float32
    layer.f = lambda z, x: torch.tanh(exact(z) + x)
    layer(x).z.square().mean().backward()
    assert (found - exact.weight.grad).norm() < 0.1 * exact.weight.grad.norm()


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
@pytest.mark.parametrize("solver", [ib.Picard(), ib.Picard(damping=0.7), ib.Anderson(memory=2)])
@pytest.mark.parametrize(
    "gradient", [ib.Phantom(), ib.Unrolled(), ib.ImplicitFunction(), ib.JacobianPenalty()]
)
def test_the_point_and_adjoint_keep_the_type_of_the_start_under_autocast(gradient, solver):
    """The map ends with a product, which autocast computes in bfloat16."""
    linear = nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight *= 0.4
    layer = ib.FixedPoint(lambda z, x: linear(torch.tanh(z) + x), solver=solver, gradient=gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = layer(torch.randn(4, 8))
        solution.z.square().mean().backward()
    assert solution.z.dtype == torch.float32
    assert linear.weight.grad.abs().max() > 0
    if solution.adjoint is not None:
        assert solution.adjoint.solution.z.dtype == torch.float32
    layer.f = lambda z, x: {"a": linear(torch.tanh(z["a"])) + x.bfloat16()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = layer(torch.randn(4, 8), {"a": torch.zeros(4, 8)})
    assert solution.z["a"].dtype == torch.float32


def test_only_the_search_runs_without_gradients():
    f, _, x = problem()
    calls = []
    layer = ib.FixedPoint(
        lambda z, x: calls.append(1) or f(z, x), stopping=ib.Stopping(tolerance=0.0, max_iterations=7)
    )
    with torch.no_grad():
        layer(x)
    assert len(calls) == 7
    calls.clear()
    layer(x)
    assert len(calls) == 7 + 4


def test_a_map_without_parameters_has_no_adjoint_and_other_gradients_remain():
    other = torch.ones(3, requires_grad=True)
    solution = ib.FixedPoint(lambda z, x: x.clone(), gradient=ib.ImplicitFunction())(torch.randn(2, 3))
    (solution.z.sum() + other.sum()).backward()
    assert other.grad.eq(1).all()
    assert solution.adjoint.solution is None


def test_the_unrolled_gradient_searches_without_gradients_only():
    f, _, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.Unrolled(steps=3), stopping=TIGHT)
    steps = layer(x)
    assert steps.iterations.tolist() == [3] * ROWS
    with pytest.raises(ValueError, match=r"max_iterations is 2, but gradient Unrolled.* own number of steps"):
        layer(x, max_iterations=2)
    with torch.no_grad():
        assert layer(x).converged.all()
        assert layer(x, max_iterations=2).iterations.tolist() == [2] * ROWS
    assert not steps.converged.any()
    assert "Calls without gradients search" in ib.Unrolled.__doc__
