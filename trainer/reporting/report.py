"""Plots of one or several runs: accuracy against length, iterations against position, the loss.

``python -m trainer.report RUN [RUN …] [--output FILE]`` draws them from the run directories; with ``--watch``
it shows the progress of runs in the terminal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks._utils.programs import CommandParser
from implicit_blocks.checkpoints.find import read_json
from trainer.cli.exit_codes import refuse
from trainer.errors import RunFolderError
from trainer.reporting.metrics import read_metrics
from trainer.reporting.pictures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    lengths_axis,
    new_figure,
    tidy,
    write_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (BLUE, ORANGE, GREEN, "#805ad5", "#b83280", "#718096")
_TITLED = 3  # maximum number of runs named in the title
_STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKERS = ("o", "s", "D", "^", "v")  # one more than the styles, for more combinations
_CONVERGED_SHARE = 0.99
"""Fraction of converged sequences below which a point is hollow."""


@dataclass(frozen=True)
class RunRecord:
    """The records of a finished run."""

    label: str
    summary: dict[str, Any]
    losses: list[tuple[int, float]]
    """Step and loss of each step with a loss."""

    @property
    def evaluation(self) -> list[dict[str, Any]]:
        """The final evaluation, one entry per set."""
        found: list[dict[str, Any]] = self.summary["evaluation"]
        return found

    @property
    def words(self) -> bool:
        """Whether the task has right answers rather than next tokens of a text."""
        return bool(self.summary["task"] == "word_problem")


_SUMMARY = {
    "name": str,
    "task": str,
    "parameters": int,
    "steps": int,
    "training_length": int,
    "last_tokens": int,
    "phases": list,
    "evaluation": list,
}
"""Summary fields that the plots need."""


def read_run(
    path: Path, *, label: str | None = None, damaged: Callable[[str], None] | None = None
) -> RunRecord:
    """Read the directory of a finished run.

    Args:
        path: the run directory.
        label: label of the run in the plot; None: its name.
        damaged: called with a message for each unreadable line of the metrics; None: such lines are errors.

    Raises:
        RunFolderError: the directory is missing, or its run is not finished.
        ValueError: its summary or metrics are truncated or modified.

    """
    summary_path = path / "summary.json"
    if not summary_path.is_file():
        if not path.is_dir():
            raise RunFolderError(f"there is no directory {path}; give directories of finished runs")
        raise RunFolderError(
            f"{path} contains no finished run (summary.json is missing); finish it by --resume"
        )
    summary = read_json(summary_path)
    for key, kind in _SUMMARY.items():
        if not isinstance(summary, dict) or not isinstance(summary.get(key), kind):
            raise RunFolderError(
                f"{summary_path} is not the summary of a run ({key} is missing or has the wrong type); "
                "remove it and write it again by --resume"
            )
    metrics_path = path / "metrics.jsonl"
    rows: Iterable[dict[str, Any]] = ()
    if metrics_path.is_file():
        rows = read_metrics(metrics_path, required=("loss",), numbers=("loss",), damaged=damaged)
    losses = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    return RunRecord(label=label or summary["name"], summary=summary, losses=losses)


def draw(runs: Sequence[RunRecord], output: Path, *, title: str | None = None) -> None:
    """Draw the runs and write the plot to ``output`` (its suffix selects the format)."""
    figure = new_figure(width=12.6, height=4.4, title=title or _title(runs))
    answers, search, loss = figure.subplots(1, 3)
    if not any(run.evaluation for run in runs):
        _nothing(answers, "no evaluation: there are no validation data")
    elif all(run.words for run in runs):
        _draw_accuracy(answers, runs)
    else:
        _draw_perplexity(answers, runs)
    _draw_iterations(search, runs)
    _draw_loss(loss, runs)
    for axes in (answers, search, loss):
        tidy(axes)
    rows = max(len(axes.get_legend_handles_labels()[0]) for axes in (answers, search, loss))
    figure.set_figheight(4.4 + 0.19 * rows)
    write_picture(figure, output)


def _title(runs: Sequence[RunRecord]) -> str:
    if len(runs) > _TITLED:
        return f"{len(runs)} runs"
    if len(runs) > 1:
        return "  vs  ".join(run.label for run in runs)
    summary = runs[0].summary
    return f"{runs[0].label}: {summary['parameters']:,} parameters, {summary['steps']:,} steps"


def distinct_labels(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Return a distinct label per run: its name, extended by its path if several runs share the name.

    Raises:
        RunFolderError: a directory is given twice.

    """
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise RunFolderError(f"{path} is given {places.count(place)} times; give each run once")
    labels = list(names)
    for name in {name for name in names if names.count(name) > 1}:
        alike = [index for index, other in enumerate(names) if other == name]
        for count in range(1, 1 + max(len(places[index].parts) for index in alike)):
            ends = ["/".join(places[index].parts[-count:]) for index in alike]
            if len(set(ends)) == len(ends):
                break
        for index, end in zip(alike, ends, strict=True):
            labels[index] = end
    # The path of a run may equal the name of another.
    return labels if len(set(labels)) == len(labels) else [str(place) for place in places]


def _color(index: int, *, of: int) -> Any:
    """Return a distinct color for each line."""
    if of <= len(_COLORS):
        return _COLORS[index]
    from matplotlib import colormaps

    return colormaps["turbo"]((index + 0.5) / of)


def _probabilities(runs: Sequence[RunRecord]) -> list[float | None]:
    found = {row.get("identity_probability") for run in runs for row in run.evaluation}
    return sorted(found, key=lambda p: -1.0 if p is None else -p)


def _line_style(runs: Sequence[RunRecord], run: int, p: int, *, probabilities: int) -> dict[str, Any]:
    """Return color and line style: runs differ by color and p by style; for a single run, p by color."""
    if len(runs) == 1:
        color = _color(p, of=probabilities)
        return {"color": color, "linestyle": "-", "marker": _MARKERS[p % len(_MARKERS)]}
    style = _STYLES[p % len(_STYLES)] if probabilities > 1 else "-"
    return {"color": _color(run, of=len(runs)), "linestyle": style, "marker": _MARKERS[p % len(_MARKERS)]}


def _name(runs: Sequence[RunRecord], run: RunRecord, p: float | None) -> str:
    parts = [run.label] if len(runs) > 1 else []
    parts += [f"p = {p:g}"] if p is not None else []
    return ", ".join(parts) or run.label


def _draw_accuracy(axes: Axes, runs: Sequence[RunRecord]) -> None:
    probabilities = _probabilities(runs)
    hollow = False
    for run_index, run in enumerate(runs):
        for p_index, p in enumerate(probabilities):
            rows = [row for row in run.evaluation if row.get("identity_probability") == p]
            if not rows:
                continue
            rows.sort(key=lambda row: row["length"])
            look = _line_style(runs, run_index, p_index, probabilities=len(probabilities))
            lengths = [row["length"] for row in rows]
            values = [100.0 * row["accuracy_last"] for row in rows]
            color, marker = look["color"], look.pop("marker")
            axes.plot(lengths, values, linewidth=1.9, **look)
            unconverged = [(row["non_converged"] or 0.0) > 1.0 - _CONVERGED_SHARE for row in rows]
            hollow |= any(unconverged)
            faces = ["white" if one else color for one in unconverged]
            axes.scatter(lengths, values, 40, faces, marker=marker, edgecolors=color, clip_on=False, zorder=5)
            axes.plot([], [], marker=marker, label=_name(runs, run, p), linewidth=1.9, **look)
    for chance in sorted({run.summary.get("chance") or 0.0 for run in runs} - {0.0}):
        axes.axhline(100.0 * chance, color=GREY, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.annotate(
            "chance", (1.0, 100.0 * chance), xycoords=("axes fraction", "data"), xytext=(-4, -11),
            textcoords="offset points", ha="right", fontsize=8.5, color=GREY,
        )  # fmt: skip
    lengths_axis(axes, sorted({row["length"] for run in runs for row in run.evaluation}))
    _mark_training_length(axes, runs)
    last = " or ".join(map(str, sorted({run.summary["last_tokens"] for run in runs})))
    axes.set_ylim(0, 103)
    axes.set_ylabel(f"accuracy over the last {last} tokens (%)")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_title(
        "Accuracy against length, at convergence" if _searched(runs) else "Accuracy against length"
    )
    if hollow:
        axes.plot(
            [], [], "o", color=GREY, markerfacecolor="white", label=f"under {_CONVERGED_SHARE:.0%} converged"
        )
    _legend(axes)


def _series(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Return the evaluation rows of each line by length; the sets of a line differ only in length.

    Sets of single tasks are omitted if there is one of all tasks.
    """
    rows = run.evaluation
    rows = [row for row in rows if "task" not in row] or rows
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        name = str(row.get("set", "")).removesuffix(f"L{row['length']}").strip("_ ")
        found.setdefault(name, []).append(row)
    return found


def _draw_perplexity(axes: Axes, runs: Sequence[RunRecord]) -> None:
    lines = [(run, name, rows) for run in runs for name, rows in _series(run).items()]
    for index, (run, name, rows) in enumerate(lines):
        points = [(row["length"], row["perplexity"]) for row in rows if row["perplexity"] is not None]
        if points:
            lengths, values = zip(*points, strict=True)
            color = _color(index, of=len(lines))
            label = ", ".join(part for part in (run.label, name) if part)
            axes.plot(lengths, values, "o-", linewidth=1.9, color=color, label=label)
    lengths_axis(axes, sorted({row["length"] for run in runs for row in run.evaluation}))
    axes.set_ylabel("validation perplexity")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_title("Perplexity against length")
    _mark_training_length(axes, runs)
    _legend(axes)


def _draw_iterations(axes: Axes, runs: Sequence[RunRecord]) -> None:
    probabilities = _probabilities(runs)
    for run_index, run in enumerate(runs):
        for p_index, p in enumerate(probabilities):
            rows = [row for row in run.evaluation if row.get("identity_probability") == p]
            rows = [row for row in rows if row.get("iterations_by_position")]
            if not rows:
                continue
            values = max(rows, key=lambda row: row["length"])["iterations_by_position"]
            look = _line_style(runs, run_index, p_index, probabilities=len(probabilities))
            look.pop("marker")
            axes.plot(range(1, len(values) + 1), values, linewidth=1.9, label=_name(runs, run, p), **look)
    axes.set_title("Iterations per token by position")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("iterations (mean over sequences)")
    if not axes.lines:
        _nothing(axes, "no iterations recorded")
        return
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _mark_training_length(axes, runs)
    _legend(axes)


def _nothing(axes: Axes, why: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=GREY)


def _draw_loss(axes: Axes, runs: Sequence[RunRecord]) -> None:
    positive = [loss for run in runs for _, loss in run.losses if loss]
    logarithmic = bool(positive) and min(positive) < max(positive) / 20
    for run_index, run in enumerate(runs):
        points = [(step, loss) for step, loss in run.losses if loss or not logarithmic]
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        color = _color(run_index, of=len(runs))
        axes.plot(steps, losses, linewidth=0.8, alpha=0.28, color=color)
        # Smooth on the scale of the axis, so that the curve runs through the middle of its points.
        middle = smoothed([math.log(loss) for loss in losses] if logarithmic else losses)
        middle = [math.exp(value) for value in middle] if logarithmic else middle
        axes.plot(steps, middle, linewidth=1.9, color=color, label=run.label)
    if logarithmic:
        axes.set_yscale("log")
    curricula: list[list[dict[str, Any]]] = [run.summary["phases"] for run in runs]
    staged = [(one, _color(run, of=len(runs))) for run, one in enumerate(curricula) if len(one) > 1]
    if len({tuple((phase["name"], phase["first_step"]) for phase in one) for one in curricula}) == 1:
        staged = [(one, GREY) for one, _ in staged[:1]]  # of all runs
    if len(staged) == 1:  # a label outside the panel would shrink it
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    _, end = axes.get_xlim()
    reached = [(phase, color) for phases, color in staged for phase in phases if phase["first_step"] <= end]
    for phase, color in reached:  # a run may have ended before its last phases
        if phase["first_step"] > 0:
            axes.axvline(phase["first_step"], color=color, linewidth=0.9, linestyle=(0, (1, 2)))
        if len(staged) == 1:  # labels of several curricula would overlap
            axes.annotate(
                phase["name"], (phase["first_step"], 0.0), xycoords=("data", "axes fraction"), xytext=(4, 5),
                textcoords="offset points", fontsize=8.5, color=color, rotation=90, va="bottom",
            )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title("Training loss")
    if len(runs) > 1:
        _legend(axes)


def smoothed(values: Sequence[float], *, share: float = 0.03) -> list[float]:
    """Return a moving average over a window of ``share`` of all values, centered on each value."""
    reach = round(share * len(values) / 2)
    sums = [0.0, *accumulate(values)]
    result = []
    for index in range(len(values)):
        first, last = max(0, index - reach), min(len(values), index + reach + 1)
        result.append((sums[last] - sums[first]) / (last - first))
    return result


def _mark_training_length(axes: Axes, runs: Sequence[RunRecord]) -> None:
    lengths = {run.summary["training_length"] for run in runs}
    if len(lengths) != 1:
        return
    (length,) = lengths
    first, last = axes.get_xlim()
    if not first <= length <= last:
        return  # a label outside the panel would shrink it
    axes.axvline(length, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length", (length, 0.03), xycoords=("data", "axes fraction"), xytext=(4, 0),
        textcoords="offset points", fontsize=8.5, color=GREY, va="bottom",
    )  # fmt: skip


def _searched(runs: Sequence[RunRecord]) -> bool:
    return any(row.get("iterations") is not None for run in runs for row in run.evaluation)


def _legend(axes: Axes) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        # Below the panel, where it covers no curve; the figure grows by its height.
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    command = CommandParser(
        prog="python -m trainer.report", description="Plot runs side by side, or watch them in the terminal."
    )
    add = command.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="directory of a finished run; with --watch of any run, or a directory that contains runs",
    )
    add("--output", type=Path, help="output file (default: report.png)")
    add("--label", action="append", default=[], help="label of a run in the plot, once per run")
    add("--title", help="title of the plot")
    add("--watch", action="store_true", help="show the progress of the runs until they are finished; no plot")
    add("--interval", type=float, metavar="SECONDS", help="--watch: time between updates (default: 2)")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m trainer.report``; return the exit code."""
    command = parser()
    options = command.parse_args(arguments)
    if options.watch and (options.output or options.label or options.title):
        command.error("--watch draws no plot; remove --output, --label and --title")
    if options.interval is not None and (not options.watch or not options.interval > 0):
        command.error(f"--interval is a positive number for --watch, got {options.interval:g}")
    if options.label and len(options.label) != len(options.runs):
        command.error(f"{len(options.label)} labels for {len(options.runs)} runs; give one per run, or none")
    if len(set(options.label)) < len(options.label):
        command.error("--label values must be distinct")
    try:
        if options.watch:
            from trainer.reporting.watch import watch

            watch(options.runs, lambda runs: distinct_labels(runs, [each.name for each in runs]),
                  interval=options.interval or 2.0)  # fmt: skip
            return 0
        output = options.output or Path("report.png")
        records = [read_run(path) for path in options.runs]
        labels = options.label or distinct_labels(options.runs, [record.label for record in records])
        records = [replace(record, label=label) for record, label in zip(records, labels, strict=True)]
        output.parent.mkdir(parents=True, exist_ok=True)
        draw(records, output, title=options.title)
    except (ValueError, OSError) as error:
        return refuse(error)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "rich"):
            raise
        return refuse(f"{package} is not installed; {install_extra('train')}")
    print(output)
    return 0
