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


def test_the_first_unconverged_search_gives_the_only_warning():
    layer = layer_of(SLOW)
    (message,) = train(layer, steps=1)
    assert "4 of 4 rows did not converge in a search of 10 iterations" in message
    assert "max_iterations" in message
    assert train(layer) == []


def test_the_first_unconverged_adjoint_gives_the_only_warning():
    stopping = ib.Stopping(tolerance=1e-6, max_iterations=3)
    layer = layer_of(0.5, iterations=64, gradient=ib.ImplicitFunction(stopping=stopping))
    (message,) = train(layer, steps=1)
    assert "did not converge in an adjoint solve of 3 iterations" in message
    assert "not that of the fixed point" in message
    assert train(layer) == []


def test_searches_and_adjoints_of_a_layer_give_one_warning_each():
    adjoint = ib.Stopping(tolerance=1e-6, max_iterations=3)
    messages = train(layer_of(SLOW, gradient=ib.ImplicitFunction(stopping=adjoint)))
    assert len(messages) == 2
    assert "search" in messages[0]
    assert "adjoint" in messages[1]


def test_one_unconverged_row_gives_a_warning():
    factor = torch.tensor([[0.1], [0.1], [0.1], [SLOW]])
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=10)
    (message,) = train(ib.FixedPoint(lambda z, x: factor * z + x, stopping=stopping))
    assert "1 of 4 rows" in message


def test_limits_of_a_call_decide_whether_its_search_is_cut_off_deliberately():
    layer, x = layer_of(SLOW), torch.ones(4, 3, requires_grad=True)
    layer(x, max_iterations=4)
    layer(x, tolerance=0.0)
    layer(x, tolerance=0.5)  # warnings would be errors
    with pytest.warns(ib.ConvergenceWarning, match="search of 9 iterations"):
        layer(x, max_iterations=9)


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
