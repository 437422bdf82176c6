"""Comparing the runs of a sweep: names, order, marks, edges, table and plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.reporting.pictures import write_picture
from trainer.sweep.grid import Axis, describe_value, make_runs, parse_axes, short_names
from trainer.sweep.plot import draw_sweep
from trainer.sweep.results import Measure, best_cell, edge_notes, read_outcome, summarize_cells
from trainer.sweep.tables import sweep_table

LOSS = Measure("loss")


def outcomes_of(values: dict[tuple[Any, ...], list[float | None]], axes: list[Axis]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{settings}-{seed}",
            "settings": dict(zip([axis.key for axis in axes], settings, strict=True)),
            "seed": seed,
            "value": value,
            "marks": [] if value is not None else ["diverged: NaN"],
            "iterations": 8.0,
            "seconds": 2.0,
        }
        for settings, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def test_axes_are_split_outside_brackets_and_quotes() -> None:
    (axis,) = parse_axes(['a.b=1e-3,{kind: x, c: [1, 2]},"p,q",true'])
    assert axis == Axis("a.b", (1e-3, {"kind": "x", "c": [1, 2]}, "p,q", True))
    assert not axis.is_numeric
    assert parse_axes(["a=1,2.5"])[0].is_numeric


def test_overrides_of_a_run_are_read_back_as_its_values() -> None:
    values = (1e-3, 2, True, None, "cosine", "true", "1e3", "300 tokens", {"kind": "muon"}, [1, 2])
    axis = Axis("a", values)
    for run, value in zip(make_runs([axis], []), values, strict=True):
        (override,) = run.overrides
        (again,) = parse_axes([override])
        assert again.values == (value,), override


def test_names_of_runs_are_distinct_and_fit_file_systems() -> None:
    values = ("a/b", "a_b", {"x": 1}, "long" * 100, 0.5)
    names = [run.name for run in make_runs([Axis("data.path", values)], [1, 2])]
    assert len(set(names)) == 10
    assert all("/" not in name and len(name) < 200 for name in names)
    assert names[-1] == "path=0.5,seed=2"


def test_short_names_tell_fields_apart() -> None:
    keys = ["training.optimizer.weight_decay", "model.weight_decay", "training.seed", "training.batch_size"]
    assert list(short_names(keys).values()) == [
        "optimizer.weight_decay",
        "model.weight_decay",
        "training.seed",
        "batch_size",
    ]


def test_cells_are_sorted_with_incomplete_ones_last() -> None:
    axes = [Axis("lr", (1, 2, 3, 4))]
    values = {(1,): [2.0, 3.0], (2,): [1.0, None], (3,): [2.0, 2.0], (4,): [None, None]}
    cells = summarize_cells(outcomes_of(values, axes), LOSS)
    assert [cell["settings"]["lr"] for cell in cells] == [3, 1, 2, 4]
    assert [cell["mean"] for cell in cells] == [2.0, 2.5, 1.0, None]
    assert cells[1]["deviation"] == pytest.approx(0.5**0.5)
    assert cells[2]["marks"] == ["seed 1: diverged: NaN"]
    best = best_cell(cells)
    assert best is not None
    assert best["settings"] == {"lr": 3}
    higher = summarize_cells(outcomes_of(values, axes), Measure("accuracy"))
    assert [cell["settings"]["lr"] for cell in higher] == [1, 3, 2, 4]
    assert best_cell(cells[3:]) is None


@pytest.mark.parametrize(
    ("values", "best", "words"),
    [
        ((1, 2, 3), 3, "largest value of the grid: add larger"),
        ((1, 2, 3), 1, "smallest value of the grid: add smaller"),
        ((3, 1, 2), 2, None),
        ((0, 1, 2), 0, None),
        ((1,), 1, None),
        (("a", "b"), "b", None),
    ],
    ids=["largest", "smallest", "inside", "zero", "single", "words"],
)
def test_a_best_value_on_the_edge_of_the_grid_is_noted(
    values: tuple[Any, ...], best: Any, words: str | None
) -> None:
    notes = edge_notes([Axis("training.lr", values)], {"settings": {"training.lr": best}})
    assert len(notes) == (words is not None)
    assert words is None or (words in notes[0] and f"best lr, {describe_value(best)}" in notes[0])
    assert edge_notes([Axis("training.lr", values)], None) == []


@pytest.mark.parametrize("kind", ["one axis", "two axes", "words", "no axes", "no values"])
def test_table_and_plot_show_every_cell(kind: str, tmp_path: Path) -> None:
    axes = {
        "one axis": [Axis("lr", (1e-3, 1e-2))],
        "two axes": [Axis("lr", (1e-3, 1e-2)), Axis("decay", (0.1, 1.5))],
        "words": [Axis("schedule.kind", ("cosine", "wsd"))],
        "no axes": [],
        "no values": [Axis("lr", (1e-3, 1e-2))],
    }[kind]
    values: dict[tuple[Any, ...], list[float | None]] = {
        tuple(value for _, value in run.settings): [None] if kind == "no values" else [1.0 + len(run.name)]
        for run in make_runs(axes, [])
    }
    cells = summarize_cells(outcomes_of(values, axes), LOSS)
    best = best_cell(cells)
    written = {
        "spec": "tiny",
        "metric": "loss",
        "set": None,
        "better": "lower",
        "best": best,
        "notes": edge_notes(axes, best),
        "cells": cells,
    }
    table = sweep_table(written, axes)
    assert len([line for line in table.splitlines() if line.startswith("|")]) == 2 + len(cells)
    assert ("best" in table) == (kind != "no values")
    write_picture(draw_sweep(written, axes), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_an_unknown_evaluation_set_is_named(tmp_path: Path) -> None:
    (run,) = make_runs([], [])
    summary = {"evaluation": [{"set": "L12", "loss": 1.0}], "stopped": None}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="--set L13: no such evaluation set; did you mean 'L12'"):
        read_outcome(run, tmp_path, Measure("loss", "L13"), {})


def test_a_run_without_evaluation_is_marked(tmp_path: Path) -> None:
    (run,) = make_runs([], [])
    keys = ("steps", "tokens", "parameters", "seconds")
    summary = {"evaluation": [], "stopped": None, **dict.fromkeys(keys, 1)}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    outcome = read_outcome(run, tmp_path, LOSS, {})
    assert (outcome["status"], outcome["value"], outcome["marks"]) == ("finished", None, ["no loss"])
