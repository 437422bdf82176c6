"""Lines of the loss in the logarithm of the size."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from trainer.experiments.equal_compute.recipes import Recipe

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
LINES = runpy.run_path(str(BENCHMARKS / "equal_compute_lines.py"))
Line, line_of_differences, line_of_losses = (
    LINES[name] for name in ("Line", "line_of_differences", "line_of_losses")
)


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


# -------------------------------------------------------------------- the program that reads result files


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return benchmarks/equal_compute_scaling.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "equal_compute_scaling.py"))


def run(size: float, seed: int, *, loops: int, perplexity: float, flops: float = 1e15) -> dict[str, Any]:
    """Return the short row of a run."""
    recipe = Recipe(
        family="llama", layers=(1, 2, 1) if loops else (0, 4, 0), loops=loops, width=int(size / 1e4),
        learning_rate=2e-3, weight_decay=1.5, petaflops=flops / 1e15, seed=seed,
    )  # fmt: skip
    return {
        "recipe": recipe.as_row(), "side": recipe.side, "parameters": int(size), "flops": flops,
        "choice": perplexity, "report": perplexity,
    }  # fmt: skip


def sizes(*millions: float) -> list[dict[str, Any]]:
    """Return seeds 0 to 3 of both sides whose lead grows by 1 % per factor of 10, plus noise."""
    rows = []
    for million in millions:
        for seed, noise in enumerate((0.5, 0.01, -0.01, 0.0)):  # seed 0 chose, and is left out
            explicit = 200 * million**-0.3
            lead = math.exp(-0.01 * math.log10(million))
            rows.append(run(million * 1e6, seed, loops=0, perplexity=explicit))
            rows.append(run(million * 1e6, seed, loops=3, perplexity=explicit * lead * math.exp(noise)))
    return rows


def test_lines_over_four_sizes_say_what_they_give_for_larger_models(program):
    found = program["series"](sizes(1.5, 5, 10, 30), layers=[1, 2, 1])
    assert [round(size / 1e6, 1) for size in found] == [1.5, 5, 10, 30]
    said = program["sentences"](found)
    assert "explicit: perplexity ∝ N^\N{MINUS SIGN}0.300 (\N{MINUS SIGN}0.300 to \N{MINUS SIGN}0.300)" in said
    assert "difference per factor of 10 in size: \N{MINUS SIGN}1.0%" in said.replace("-", "\N{MINUS SIGN}")
    assert "at 130 M, 4 times the largest size" in said
    assert "at 1300 M, 43 times the largest size" in said
    line = program["fitted"](found)["difference"]
    mean, low, high = line.at(math.log(1.3e9))
    assert low < mean < high
    assert mean == pytest.approx(-0.01 * math.log10(1300))
    assert len(program["table"](found).splitlines()) == 2 + 4


def test_one_size_gives_no_line(program):
    assert "no line" in program["sentences"](program["series"](sizes(5), layers=[1, 2, 1]))


def test_sizes_whose_sides_have_other_budgets_are_refused(program):
    rows = [run(5e6, 1, loops=0, perplexity=70.0), run(5e6, 1, loops=3, perplexity=70.0, flops=1.1e15)]
    with pytest.raises(ValueError, match=r"5.0 M parameters have budgets of 1 PFLOP and 1.1 PFLOP"):
        program["series"](rows, layers=[1, 2, 1])
