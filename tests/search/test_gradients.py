"""Gradient estimators against what they claim to compute, in float64."""

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
    """Dense ∂f/∂z, ∂f/∂x and ∂f/∂W of each row at z."""
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
    """``g · series(∂f/∂z) · ∂f/∂·`` for each row."""
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


def test_implicit_function_gradient_against_finite_differences():
    f, weight, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)
    assert torch.autograd.gradcheck(lambda x, w: layer(x).z, (x, weight))


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.8), (4, 0.8), (6, 0.5)])
def test_phantom_gradient_is_its_formula(steps, damping):
    """λ ∂f/∂θ Σ_{i<k} (λ ∂f/∂z + (1 − λ) I)^i, at a point converged so far that the steps do not move it."""
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
def test_unrolled_gradient_is_that_of_the_computation(solver, checkpointing):
    f, weight, x = problem()
    layer = ib.FixedPoint(f, solver=solver, gradient=ib.Unrolled(steps=4, checkpointing=checkpointing))
    assert torch.autograd.gradcheck(lambda x, w: layer(x).z, (x, weight))


def test_unrolled_steps_are_the_solvers():
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


def test_unrolled_memory_does_not_grow_with_steps_when_checkpointed():
    """What is kept a further step is z itself, not the activations within f."""
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


def test_an_undifferentiable_solver_is_refused():
    class Opaque(ib.Picard):
        differentiable = False

    f, _, x = problem()
    with pytest.raises(ValueError, match="does not declare itself"):
        ib.FixedPoint(f, solver=Opaque(), gradient=ib.Unrolled())(x)


@pytest.mark.parametrize(
    "solver", [ib.Picard(damping=0.8), ib.Anderson(memory=2)], ids=["picard", "anderson"]
)
def test_padding_enters_no_unrolled_step(solver):
    """Anderson mixes a whole row: what stands at padding must not weigh in."""
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


# ------------------------------------------------------------------------------------------- the layer


def test_two_solves_before_one_backward():
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


def test_the_adjoint_that_is_told_is_that_of_the_latest_backward_pass():
    f, _, x = problem()
    solution = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)(x)
    assert solution.adjoint.solution is None
    loss = weighted(solution.z)
    loss.backward(retain_graph=True)
    first = solution.adjoint.solution
    (2 * loss).backward()
    torch.testing.assert_close(solution.adjoint.solution.z, 2 * first.z)


def test_a_solve_feeds_another():
    f, weight, x = problem()
    layer = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)
    assert torch.autograd.gradcheck(lambda x, w: layer(layer(x).z).z, (x, weight))


@pytest.mark.parametrize("gradient", [ib.Phantom(), ib.Unrolled(), ib.ImplicitFunction()])
def test_autocast(gradient):
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


@pytest.mark.parametrize("solver", [ib.Picard(), ib.Picard(damping=0.7), ib.Anderson(memory=2)])
@pytest.mark.parametrize(
    "gradient", [ib.Phantom(), ib.Unrolled(), ib.ImplicitFunction(), ib.JacobianPenalty()]
)
def test_autocast_of_a_map_that_ends_with_a_product(gradient, solver):
    """It returns bfloat16; the point, and the adjoint, stay in the type of the start."""
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


def test_without_gradients_the_search_alone_runs():
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


def test_structured_values():
    linear = nn.Linear(6, 6).double()
    with torch.no_grad():
        linear.weight *= 0.3

    def f(z, x):
        joined = torch.cat((z["a"].flatten(1), z["b"]), dim=1)
        out = torch.tanh(linear(joined) + x)
        return {"a": out[:, :4].view(-1, 2, 2), "b": out[:, 4:]}

    x = torch.randn(3, 6, dtype=torch.float64)
    start = {"a": torch.zeros(3, 2, 2, dtype=torch.float64), "b": torch.zeros(3, 2, dtype=torch.float64)}
    layer = ib.FixedPoint(f, gradient=ib.ImplicitFunction(stopping=TIGHT), stopping=TIGHT)
    solution = layer(x, start)
    plain = ib.FixedPoint(lambda z, x: torch.tanh(linear(z) + x), stopping=TIGHT)
    joined = torch.cat((solution.z["a"].flatten(1), solution.z["b"]), dim=1)
    torch.testing.assert_close(joined, plain(x).z, atol=1e-10, rtol=0)
    joined.sum().backward()
    assert linear.weight.grad.abs().sum() > 0


def test_entries_of_a_dict_are_known_by_name_not_by_order():
    x = torch.randn(3, 4)

    def f(z, x):
        return {"b": torch.tanh(0.5 * z["a"] + x), "a": torch.tanh(0.3 * z["b"] - x)}

    stopping = ib.Stopping(tolerance=1e-6, max_iterations=100)
    found = ib.FixedPoint(f, stopping=stopping)(x, {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}).z
    torch.testing.assert_close(found, f(found, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("z0", "message"),
    [
        (3.0, "z0 holds float; give a tensor, or"),
        ((), "z0 holds nothing; give a tensor"),
        ((torch.zeros(3, 2), torch.zeros(2, 2)), r"\(3, 2\) of float32, \(2, 2\) of float32; all must lead"),
        ((torch.zeros(0, 2),), "and none be empty"),
        ((torch.zeros(3, 2), torch.zeros(3, 2).double()), "float64; give all of them one type"),
    ],
)
def test_a_start_that_does_not_fit_together_is_refused(z0, message):
    with pytest.raises(ValueError, match=message):
        ib.FixedPoint(lambda z, x: z)(None, z0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda z: {"a": z["a"]}, "f returned another structure than that of z"),
        (lambda z: {"a": z["a"], "b": None}, r"f returned \[\(3,\), 'NoneType'\]; z has"),
        (
            lambda z: {"a": z["a"], "b": z["b"][:, :1]},
            r"f returned \[\(3,\), \(3, 1\)\]; z has \[\(3,\), \(3, 2\)\]",
        ),
    ],
)
def test_another_structure_than_the_starts_is_refused(returned, message):
    layer = ib.FixedPoint(lambda z, x: returned(z))
    with pytest.raises(ValueError, match=message):
        layer(None, {"a": torch.zeros(3), "b": torch.zeros(3, 2)})


def test_a_map_of_nothing_that_is_learned_has_no_gradient_and_breaks_none():
    other = torch.ones(3, requires_grad=True)
    solution = ib.FixedPoint(lambda z, x: x.clone(), gradient=ib.ImplicitFunction())(torch.randn(2, 3))
    (solution.z.sum() + other.sum()).backward()
    assert other.grad.eq(1).all()
    assert solution.adjoint.solution is None


def test_layer_errors():
    with pytest.raises(ValueError, match="give the start z0"):
        ib.FixedPoint(lambda z, x: z)(("no", "tensor"))
    with pytest.raises(ValueError, match="they must agree"):
        ib.FixedPoint(lambda z, x: z[:, :1])(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="f returned a tuple"):
        ib.FixedPoint(lambda z, x: (z, z))(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="floating-point"):
        ib.FixedPoint(lambda z, x: z)(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="none of them 0"):
        ib.FixedPoint(lambda z, x: z)(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="solver is 'anderson'; give a Solver such as Anderson"):
        ib.FixedPoint(lambda z, x: z, solver="anderson")
    with pytest.raises(ValueError, match=r"gradient is .*; give a GradientEstimator such as Phantom"):
        ib.FixedPoint(lambda z, x: z, gradient=ib.PhantomSpec())
    with pytest.raises(ValueError, match=r"stopping is .*; give a Stopping such as"):
        ib.FixedPoint(lambda z, x: z, stopping={"tolerance": 1e-3})
    with pytest.raises(ValueError, match="f is None; give a function"):
        ib.FixedPoint(None)
    with pytest.raises(ValueError, match=r"f returned torch.float64 for z of torch.float32; they must agree"):
        ib.FixedPoint(lambda z, x: z.double())(torch.zeros(2, 3))


def test_what_a_layer_is_made_of_is_shown():
    layer = ib.FixedPoint(nn.Linear(3, 3), solver=ib.Anderson(memory=2), gradient=ib.Phantom(steps=3))
    assert "solver=Anderson(memory=2, damping=1.0, regularization=1e-06)" in repr(layer)
    assert "gradient=Phantom(steps=3, damping=0.8), stopping=Stopping(tolerance=" in repr(layer)
    assert "(f): Linear(in_features=3" in repr(layer)


def test_parameters_of_the_map_are_the_layers():
    linear = nn.Linear(3, 3)

    class Map(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, z, x):
            return torch.tanh(self.linear(z) + x)

    layer = ib.FixedPoint(Map())
    assert set(layer.parameters()) == set(linear.parameters())
    assert torch.equal(copy.deepcopy(layer)(torch.ones(2, 3)).z, layer(torch.ones(2, 3)).z)
