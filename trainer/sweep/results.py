"""The results of a sweep: outcomes of its runs, cells over seeds, the best cell, edges. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_blocks._utils.hints import did_you_mean
from trainer.cli.exit_codes import NOT_FINITE
from trainer.reporting.metrics import grows_to_improve
from trainer.storage.files import read_json
from trainer.storage.run_folder import RunFolder
from trainer.sweep.grid import Axis, GridRun, describe_value, short_names

METRICS = ("loss", "perplexity", "accuracy", "accuracy_last", "iterations", "residual", "token_converged")
_OPEN = 0.01
"""Share of unconverged sequences in the evaluation above which a run is marked."""


@dataclass(frozen=True)
class Measure:
    """The metric of the final evaluation that runs are compared by; ``set`` None: of the first set."""

    metric: str
    set: str | None = None

    @property
    def sign(self) -> float:
        """1 if larger values are better, else −1."""
        return 1.0 if grows_to_improve(self.metric) else -1.0

    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of the set in a run's summary; empty if the run has no evaluation.

        Raises:
            ValueError: there is no such set.

        """
        rows: list[dict[str, Any]] = summary["evaluation"]
        if self.set is None:
            return rows[0] if rows else {}
        names = [str(row["set"]) for row in rows]
        if self.set not in names:
            raise ValueError(f"--set {self.set}: no such evaluation set; {did_you_mean(self.set, names)}")
        return rows[names.index(self.set)]


def read_outcome(run: GridRun, folder: Path, measure: Measure, failure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcome of a run as JSON values.

    ``status`` is ``finished``, ``failed`` (with ``exit_code`` and ``reason``) or ``unfinished``. ``marks``
    lists what must be known of the value: the run failed, ended early, or did not converge.

    Args:
        run: of the grid.
        folder: of the run.
        measure: what is compared.
        failure: ``exit_code`` and ``reason`` of the last attempt; empty if it did not fail.

    Raises:
        ValueError: the summary is damaged, or has no such evaluation set.

    """
    outcome: dict[str, Any] = {
        "name": run.name,
        "folder": str(folder),
        "settings": dict(run.settings),
        "seed": run.seed,
        "status": "unfinished",
        "value": None,
        "marks": ["unfinished"],
    }
    place = RunFolder(folder)
    if not place.summary_path.is_file():
        if failure:
            what = "diverged" if failure["exit_code"] == NOT_FINITE else "failed"
            outcome |= {"status": "failed", **failure, "marks": [f"{what}: {failure['reason']}"]}
        return outcome
    summary = read_json(place.summary_path)
    row = measure.row(summary)
    marks = []
    if row.get(measure.metric) is None:
        marks.append(f"no {measure.metric}")
    if summary["stopped"] is not None:
        marks.append(f"ended early at step {summary['steps']}: {summary['stopped']}")
    if (row.get("non_converged") or 0.0) > _OPEN:
        marks.append(f"{row['non_converged']:.1%} not converged")
    return outcome | {
        "status": "finished",
        "value": row.get(measure.metric),
        "marks": marks,
        "set": row.get("set"),
        **{key: summary[key] for key in ("steps", "tokens", "parameters", "seconds", "stopped")},
        **{key: row.get(key) for key in ("loss", "iterations", "non_converged")},
    }


def summarize_cells(outcomes: Sequence[Mapping[str, Any]], measure: Measure) -> list[dict[str, Any]]:
    """Return the cells of the grid, the best first: the mean over seeds and its standard deviation.

    Cells without a value for every seed follow those with all values, since their mean is not comparable.
    """
    cells: list[dict[str, Any]] = []
    for outcome in outcomes:
        if not cells or cells[-1]["settings"] != outcome["settings"]:
            cells.append({"settings": outcome["settings"], "runs": []})
        cells[-1]["runs"].append(outcome)
    for cell in cells:
        values = [run["value"] for run in cell["runs"] if run["value"] is not None]
        cell["complete"] = len(values) == len(cell["runs"])
        cell["values"] = values
        cell["mean"] = statistics.fmean(values) if values else None
        cell["deviation"] = statistics.stdev(values) if len(values) > 1 else None
        cell["marks"] = _marks(cell["runs"])
        cell["seconds"] = sum(run.get("seconds") or 0.0 for run in cell["runs"])
        iterations = [run["iterations"] for run in cell["runs"] if run.get("iterations") is not None]
        cell["iterations"] = statistics.fmean(iterations) if iterations else None
        cell["runs"] = [run["name"] for run in cell["runs"]]

    def order(cell: Mapping[str, Any]) -> tuple[bool, bool, float]:
        mean = cell["mean"]
        return not cell["complete"], mean is None, 0.0 if mean is None else -measure.sign * mean

    return sorted(cells, key=order)


def _marks(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the marks of a cell's runs, with the seed where there are several."""
    several = len(runs) > 1
    return [f"seed {run['seed']}: {mark}" if several else mark for run in runs for mark in run["marks"]]


def best_cell(cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the best cell of :func:`summarize_cells`; None if no cell has a value for every seed."""
    return cells[0] if cells and cells[0]["complete"] else None


def edge_notes(axes: Sequence[Axis], best: Mapping[str, Any] | None) -> list[str]:
    """Return a note for each numeric axis on whose edge the best cell lies: the grid should be wider.

    A smallest value of 0 is no edge, because most quantities cannot be negative.
    """
    names, notes = short_names([axis.key for axis in axes]), []
    for axis in axes if best is not None else ():
        value = best["settings"][axis.key] if best is not None else None
        if not axis.is_numeric or len(axis.values) < 2:
            continue
        ends = {max(axis.values): ("largest", "larger")}
        if min(axis.values) != 0:
            ends[min(axis.values)] = ("smallest", "smaller")
        if value in ends:
            which, more = ends[value]
            notes.append(
                f"the best {names[axis.key]}, {describe_value(value)}, is the {which} value of the grid: "
                f"add {more} values and run the command again"
            )
    return notes
