"""The table of a sweep. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.evaluation.tables import markdown
from trainer.reporting.display import duration
from trainer.sweep.grid import Axis, describe_value, short_names

_LONGEST_MARK = 60


def sweep_table(written: Mapping[str, Any], axes: Sequence[Axis]) -> str:
    """Return the cells, the best first, as a Markdown table, with notes below it.

    Args:
        written: the contents of ``sweep.json``.
        axes: of the grid.

    """
    names = short_names([axis.key for axis in axes])
    best = written["best"]
    searched = any(cell["iterations"] is not None for cell in written["cells"])
    header = ["", *names.values(), written["metric"], "runs"]
    rows = [[*header, *(["iterations"] if searched else []), "time", "marks"]]
    for cell in written["cells"]:
        is_best = best is not None and cell["settings"] == best["settings"]
        row = ["best" if is_best else ""]
        row += [describe_value(cell["settings"][key]) for key in names]
        row += [_value(cell), f"{len(cell['values'])}/{len(cell['runs'])}"]
        if searched:
            row.append("" if cell["iterations"] is None else f"{cell['iterations']:.1f}")
        row += [duration(cell["seconds"]), "; ".join(map(_short, cell["marks"]))]
        rows.append(row)
    better = "higher" if written["better"] == "higher" else "lower"
    of_set = "" if written["set"] is None else f" of set {written['set']}"
    lines = [markdown(rows), "", f"{written['metric']}{of_set}: {better} is better."]
    if any(cell["deviation"] is not None for cell in written["cells"]):
        lines.append("Values are means over seeds ± the standard deviation.")
    lines += [f"NOTE: {note}" for note in written["notes"]]
    return "\n".join(lines)


def _value(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None:
        return ""
    spread = "" if cell["deviation"] is None else f" ± {cell['deviation']:.2g}"
    return f"{cell['mean']:.5g}{spread}"


def _short(mark: str) -> str:
    mark = mark.replace("|", "/").replace("\n", " ")
    return mark if len(mark) <= _LONGEST_MARK else f"{mark[:_LONGEST_MARK]}…"
