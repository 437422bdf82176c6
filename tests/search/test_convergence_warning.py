"""Convergence warnings: one if many searches or adjoints in training don't converge, else none."""

from __future__ import annotations

import warnings

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.convergence_watch import SOLVES, ConvergenceWatch

SLOW = 0.98
"""A contraction rate that needs more than 10 iterations."""


def train(layer: ib.FixedPoint, steps: int = 3 * SOLVES) -> list[str]:
    """Return the warnings of some training steps."""
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


def test_unconverged_searches_give_one_warning_with_their_share():
    (message,) = train(layer_of(SLOW))
    assert "100% of the searches of the last 20 training steps did not converge" in message
    assert "max_iterations" in message


def test_unconverged_adjoints_give_one_warning():
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
def test_converged_bounded_and_unrolled_layers_give_no_warning(layer):
    assert train(layer) == []


def test_evaluation_gives_no_warning():
    layer = layer_of(SLOW)
    with torch.no_grad():
        for _ in range(2 * SOLVES):  # a warning would be an error
            assert not layer(torch.ones(4, 3)).converged.all()


def test_a_quarter_of_unconverged_rows_gives_no_warning_and_later_steps_are_watched():
    watch = ConvergenceWatch("searches", "do something")
    assert [watch.add(0.25) for _ in range(SOLVES)] == [None] * SOLVES
    assert [watch.add(0.3) for _ in range(SOLVES - 1)] == [None] * (SOLVES - 1)
    assert (
        watch.add(0.3) == "30% of the searches of the last 20 training steps did not converge; do something"
    )
    assert [watch.add(1.0) for _ in range(2 * SOLVES)] == [None] * (2 * SOLVES)
