"""``FixedPoint``: structured values, refused arguments, representation and parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import implicit_blocks as ib

TIGHT = ib.Stopping(tolerance=1e-13, max_iterations=500)


def test_a_dict_of_tensors_has_the_fixed_point_of_one_tensor():
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


def test_entries_of_a_dict_are_matched_by_name_not_by_order():
    x = torch.randn(3, 4)

    def f(z, x):
        return {"b": torch.tanh(0.5 * z["a"] + x), "a": torch.tanh(0.3 * z["b"] - x)}

    stopping = ib.Stopping(tolerance=1e-6, max_iterations=100)
    found = ib.FixedPoint(f, stopping=stopping)(x, {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}).z
    torch.testing.assert_close(found, f(found, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("z0", "message"),
    [
        (3.0, "z0 contains float; give a tensor, or"),
        ((), "z0 contains nothing; give a tensor"),
        (
            (torch.zeros(3, 2), torch.zeros(2, 2)),
            r"\(3, 2\) of float32, \(2, 2\) of float32; all must have the batch",
        ),
        ((torch.zeros(0, 2),), "no tensor may be empty"),
        ((torch.zeros(3, 2), torch.zeros(3, 2).double()), "float64; give all of them the same type"),
    ],
)
def test_an_inconsistent_start_is_refused(z0, message):
    with pytest.raises(ValueError, match=message):
        ib.FixedPoint(lambda z, x: z)(None, z0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda z: {"a": z["a"]}, "f returned a structure that differs"),
        (lambda z: {"a": z["a"], "b": None}, r"f returned \[\(3,\), 'NoneType'\] for z of"),
        (
            lambda z: {"a": z["a"], "b": z["b"][:, :1]},
            r"f returned \[\(3,\), \(3, 1\)\] for z of \[\(3,\), \(3, 2\)\]",
        ),
    ],
)
def test_another_structure_than_that_of_the_start_is_refused(returned, message):
    layer = ib.FixedPoint(lambda z, x: returned(z))
    with pytest.raises(ValueError, match=message):
        layer(None, {"a": torch.zeros(3), "b": torch.zeros(3, 2)})


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="give the start z0"):
        ib.FixedPoint(lambda z, x: z)(("no", "tensor"))
    with pytest.raises(ValueError, match="shapes must agree"):
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
    with pytest.raises(ValueError, match=r"f returned torch.float64 for z of torch.float32; the types"):
        ib.FixedPoint(lambda z, x: z.double())(torch.zeros(2, 3))


def test_the_representation_contains_solver_gradient_and_stopping():
    layer = ib.FixedPoint(nn.Linear(3, 3), solver=ib.Anderson(memory=2), gradient=ib.Phantom(steps=3))
    assert "solver=Anderson(memory=2, damping=1.0, regularization=1e-06)" in repr(layer)
    assert "gradient=Phantom(steps=3, damping=0.8), stopping=Stopping(tolerance=" in repr(layer)
    assert "(f): Linear(in_features=3" in repr(layer)


def test_parameters_of_the_map_are_parameters_of_the_layer():
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


def half(z, x):
    return 0.5 * z + x


@pytest.mark.parametrize("gradient", [None, ib.ImplicitFunction(), ib.LastLoops(loops=2)])
def test_a_layer_that_returns_its_tensor_fits_a_sequence_of_layers(gradient):
    options = {"gradient": gradient, "stopping": ib.Stopping(tolerance=1e-6, max_iterations=100)}
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    network = nn.Sequential(first, ib.FixedPoint(half, returns="tensor", **options), last)
    x = torch.randn(5, 3)
    solution = ib.FixedPoint(half, **options)(first(x))
    assert torch.equal(network(x), last(solution.z))
    network(x).sum().backward()
    assert first.weight.grad.abs().sum() > 0


def test_a_layer_returns_the_structure_of_its_start_as_tensors():
    layer = ib.FixedPoint(lambda z, x: {"a": 0.5 * z["a"] + x}, returns="tensor")
    assert layer(torch.ones(2, 3), {"a": torch.zeros(2, 3)})["a"].shape == (2, 3)


def test_a_call_has_its_own_tolerance_and_iterations():
    layer = ib.FixedPoint(half, stopping=ib.Stopping(tolerance=1e-2, max_iterations=20))
    x = torch.ones(2, 3)
    usual, accurate, few = layer(x), layer(x, tolerance=1e-5), layer(x, tolerance=1e-5, max_iterations=9)
    assert usual.iterations.max() < accurate.iterations.max()
    assert accurate.residual.max() <= 1e-5
    assert few.iterations.tolist() == [9, 9]
    assert not few.converged.any()
    assert torch.equal(layer(x).iterations, usual.iterations)
    pair = ib.FixedPoint(lambda z, x: (0.5 * z[0] + x,))
    assert pair(x, (torch.zeros(2, 3),), tolerance=0.0, max_iterations=3).iterations.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tolerance": -1.0}, "tolerance"), ({"max_iterations": 0}, "max_iterations")],
)
def test_limits_of_a_call_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ib.FixedPoint(half)(torch.ones(2, 3), **options)


def test_another_return_and_a_dropped_penalty_are_refused():
    with pytest.raises(ValueError, match="returns is 'z'; choose 'solution' or 'tensor'"):
        ib.FixedPoint(half, returns="z")
    layer = ib.FixedPoint(half, returns="tensor", gradient=ib.JacobianPenalty())
    with pytest.raises(ValueError, match="penalty, which returns='tensor' would drop"):
        layer(torch.ones(2, 3, requires_grad=True))
