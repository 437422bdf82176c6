"""One warning where many searches or adjoints of a training run don't converge, and none elsewhere."""

from __future__ import annotations

import warnings

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.convergence_watch import SOLVES, ConvergenceWatch

SLOW = 0.98
"""A factor by which a map contracts so slowly that 10 iterations don't do."""


def train(layer: ib.FixedPoint, steps: int = 3 * SOLVES) -> list[str]:
    """Return the warnings of some steps of training."""
    x = torch.ones(4, 3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            layer(x).z.sum().backward()
    assert all(issubclass(each.category, ib.ConvergenceWarning) for each in caught)
    return [str(each.message) for each in caught]


def layer_of(factor: float, *, iterations: int = 10, tolerance: float = 1e-3, **options) -> ib.FixedPoint:
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=iterations)
    return ib.FixedPoint(lambda z, x: factor * z + x, stopping=stopping, **options)


def test_searches_that_do_not_converge_give_one_warning_with_the_share():
    (message,) = train(layer_of(SLOW))
    assert "100% of the searches of the last 20 training steps did not converge" in message
    assert "max_iterations" in message


def test_adjoints_that_do_not_converge_give_one_too():
    stopping = ib.Stopping(tolerance=1e-6, max_iterations=3)
    layer = layer_of(0.5, iterations=64, gradient=ib.ImplicitFunction(stopping=stopping))
    (message,) = train(layer)
    assert "100% of the adjoint solves of the last 20 training steps" in message
    assert "not that of the fixed point" in message


@pytest.mark.parametrize(
    "layer",
    [
        layer_of(0.5, iterations=64),
        layer_of(0.5, iterations=64, gradient=ib.ImplicitFunction()),
        layer_of(SLOW, iterations=4),
        layer_of(SLOW, tolerance=0.0),
        layer_of(SLOW, gradient=ib.Unrolled(steps=20)),
    ],
    ids=["converged", "converged adjoint", "bounded", "no tolerance", "unrolled"],
)
def test_nothing_else_does(layer):
    assert train(layer) == []


def test_evaluation_gives_none():
    layer = layer_of(SLOW)
    with torch.no_grad():
        for _ in range(2 * SOLVES):
            layer(torch.ones(4, 3))


def test_a_share_of_a_quarter_is_let_pass_and_later_steps_are_looked_at():
    watch = ConvergenceWatch("searches", "do something")
    assert [watch.add(0.25) for _ in range(SOLVES)] == [None] * SOLVES
    assert [watch.add(0.3) for _ in range(SOLVES - 1)] == [None] * (SOLVES - 1)
    assert (
        watch.add(0.3) == "30% of the searches of the last 20 training steps did not converge; do something"
    )
    assert [watch.add(1.0) for _ in range(2 * SOLVES)] == [None] * (2 * SOLVES)
