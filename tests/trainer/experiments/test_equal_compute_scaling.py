"""Lines of the loss in the logarithm of the size."""

from __future__ import annotations

import math

import pytest

from trainer.experiments.equal_compute.scaling import Line, line_of_differences, line_of_losses


def test_a_line_of_exact_values_has_no_uncertainty():
    line = Line.fitted([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    assert (line.intercept, line.slope) == pytest.approx((1.0, 2.0))
    assert line.at(10.0) == pytest.approx((21.0, 21.0, 21.0))
    assert line.slope_interval == pytest.approx((2.0, 2.0))


def test_intervals_are_those_of_least_squares():
    # Residuals ±1 at x = 0 and 1, two values each: variance 4 / 2 = 2, 1 / squares = 1, t = 4.303.
    line = Line.fitted([0.0, 0.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 3.0])
    assert line.slope == pytest.approx(2.0)
    low, high = line.slope_interval
    assert (high - low) / 2 == pytest.approx(4.303 * math.sqrt(2))
    mean, low, high = line.at(0.5)
    assert mean == pytest.approx(1.0)
    assert (high - low) / 2 == pytest.approx(4.303 * math.sqrt(2 / 4))


def test_intervals_widen_away_from_the_sizes():
    line = Line.fitted([0.0, 0.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 3.0])
    widths = [high - low for _, low, high in map(line.at, (0.5, 1.0, 5.0))]
    assert widths == sorted(widths)


def test_two_values_give_no_interval_and_one_size_no_line():
    line = Line.fitted([0.0, 1.0], [1.0, 2.0])
    assert all(map(math.isnan, (*line.at(2.0)[1:], *line.slope_interval)))
    with pytest.raises(ValueError, match="two sizes"):
        Line.fitted([1.0, 1.0], [1.0, 2.0])


def test_differences_are_those_of_seeds_that_both_sides_have():
    ours = {10: {1: 4.0, 2: 4.2}, 100: {1: 3.0, 3: 9.0}}
    theirs = {10: {1: 4.1, 2: 4.4}, 100: {1: 3.3}, 1000: {1: 1.0}}
    line = line_of_differences(ours, theirs)
    assert line.count == 3
    assert line.at(math.log(10))[0] == pytest.approx(-0.15)
    assert line_of_losses(ours).count == 4
