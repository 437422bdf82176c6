"""The tables of puzzles equal the stored results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.documentation.tables import percent, results, table


def test_reasoning_table_of_sudoku_of_order_9() -> None:
    found = results("sudoku_9x9")
    shown = table("reasoning", "at most | iterations (mean)")
    for row, cells in zip(found["restarts"]["rows"], shown, strict=True):
        assert cells == [
            str(row["max_iterations"]),
            f"{row['mean_iterations']:.0f}",
            percent(row["converged"]),
            *(percent(share) for share in row["solved"].values()),
            percent(row["solved_by_residual"]["8"]),
            percent(row["solved_by_any"]),
        ]
    (more,) = found["more_restarts"]["rows"]
    (shares,) = table("reasoning", "surest of | 1")
    assert shares == ["boards solved", *(percent(share) for share in more["solved"].values())]
    alone = found["restarts"]["rows"][-1]["solved"]["1"]
    assert found["evaluation"]["sequence_accuracy"] == pytest.approx(alone, abs=1e-6)


def mazes(run: Any, side: int, shortest: int, most: int) -> list[Any]:
    """Return the measurements of mazes of this size, with at most this number of iterations."""
    wanted = {
        "side": side,
        "shortest": shortest,
        "max_iterations": most,
        "precision": "float32",
        "damping": 1,
    }
    return [row for row in run["rows"] if wanted.items() <= row.items()]


def test_reasoning_tables_of_mazes() -> None:
    runs = results("maze_30x30")["runs"]
    expected = []
    for run in runs:
        for side, shortest, most in ((30, 60, 512), (30, 100, 512), (40, 120, 1024)):
            for row in mazes(run, side, shortest, most):
                if "8" in row["solved"]:
                    shares = [row["converged"], *row["solved"].values(), row["any"]]
                    size = f"{side} x {side}, {shortest} steps or more"
                    means = [f"{row[name]:.0f}" for name in ("length", "iterations")]
                    expected.append([run["name"], size, str(row["boards"]), *means, *map(percent, shares)])
    assert table("reasoning", "run | mazes") == expected
    curve = table("reasoning", "at most | iterations (mean) | converged | one start | surest of 8")
    for most, iterations, converged, one, *eight in curve:
        found = mazes(runs[0], 30, 60, int(most))
        assert [iterations, converged, one] == [
            f"{found[0]['iterations']:.0f}",
            percent(found[0]["converged"]),
            percent(found[0]["solved"]["1"]),
        ]
        assert eight == [percent(row["solved"]["8"]) for row in found if "8" in row["solved"]] or eight == [
            ""
        ]
