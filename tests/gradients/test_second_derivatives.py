"""Second derivatives: exact where an estimator supports them, an error in backward elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.ops.backends import first_derivatives_only
from implicit_blocks.ops.cross_entropy import linear_cross_entropy
from implicit_blocks.weights.cache import join

ROWS, WIDTH = 2, 3
TIGHT = ib.Stopping(tolerance=1e-13, max_iterations=500)


@pytest.fixture
def weight():
    return nn.Parameter(0.3 * torch.linalg.qr(torch.randn(WIDTH, WIDTH).double())[0])


@pytest.fixture
def x():
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)


def layer_of(gradient, weight, solver=None):
    return ib.FixedPoint(
        lambda z, x: torch.tanh(z @ weight.T + x) + 0.3 * torch.sin(x * z),
        gradient=gradient,
        solver=solver,
        stopping=TIGHT,
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    "solver", [ib.Picard(damping=0.8), ib.Anderson(memory=2), ib.Broyden(memory=2)], ids=repr
)
def test_second_derivatives_of_unrolled_steps_are_exact(solver, checkpointing, weight, x):
    layer = layer_of(ib.Unrolled(steps=3, checkpointing=checkpointing), weight, solver)
    assert torch.autograd.gradgradcheck(lambda x, _: layer(x).z, (x, weight))


def test_second_derivatives_of_phantom_steps_exclude_the_search(weight, x):
    layer = layer_of(ib.Phantom(steps=2, damping=0.7), weight)
    solution = layer(x)
    with torch.no_grad():  # the starting point of the phantom steps
        found = layer(x).z
    z = found
    for _ in range(2):
        z = torch.lerp(z, layer.f(z, x), 0.7)
    both = []
    for value in (solution.z, z):
        first = torch.autograd.grad(value.square().sum(), (weight, x), create_graph=True)
        both.append(torch.autograd.grad(sum(g.square().sum() for g in first), (weight, x)))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_implicit_function_refuses_second_derivatives(weight, x):
    layer = layer_of(ib.ImplicitFunction(stopping=TIGHT), weight)
    with pytest.raises(RuntimeError, match=r"ImplicitFunction.*second derivatives"):
        torch.autograd.grad(layer(x).z.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.gradgradcheck(lambda x, _: layer(x).z, (x, weight))
    (twice,) = torch.autograd.grad(layer(x).z.sum(), weight, retain_graph=True)
    assert twice.isfinite().all()


def test_fused_cross_entropy_refuses_second_derivatives():
    z, head = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss, _ = linear_cross_entropy(z, head, torch.tensor([0, 1, 2, 4]))
    with pytest.raises(RuntimeError, match=r"cross entropy.*second derivatives"):
        torch.autograd.grad(loss, (z, head), create_graph=True)


def test_layerwise_weight_gradients_refuse_second_derivatives():
    layer = nn.Linear(3, 2, bias=False)
    ((_, joined),) = join([(layer, 2 * layer.weight)], list(layer.parameters()))
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(joined.sum(), layer.weight, create_graph=True)


def test_first_derivatives_only_refuses_create_graph_even_if_the_incoming_gradient_has_no_graph():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @first_derivatives_only("the square", "write x * x")
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g

    x = torch.tensor(3.0, requires_grad=True)
    (first,) = torch.autograd.grad(Square.apply(x), x)
    assert first == 6
    assert not first.requires_grad
    with pytest.raises(RuntimeError, match=r"the square.*second derivatives.*write x"):
        torch.autograd.grad(Square.apply(x), x, create_graph=True)
