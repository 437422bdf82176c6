"""The picture of a run, or of several: accuracy against length, iterations against position, the loss.

``python -m trainer.report RUN [RUN …] [--output FILE]`` draws it from what the runs' folders hold.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_blocks.own_parts import install_extra
from trainer.drawing import BLUE, GREEN, GREY, ORANGE, lengths_axis, new_figure, tidy, write_picture
from trainer.errors import RunFolderError
from trainer.exit_codes import refuse
from trainer.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (BLUE, ORANGE, GREEN, "#805ad5", "#b83280", "#718096")
_STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKERS = ("o", "s", "D", "^")
_OPEN_BELOW = 0.99
"""A point is drawn hollow where a smaller fraction of its sequences than this had converged."""


@dataclass(frozen=True)
class RunRecord:
    """What a finished run's folder says about it."""

    label: str
    summary: dict[str, Any]
    losses: list[tuple[int, float]]
    """Step and loss of each step that had one."""

    @property
    def evaluation(self) -> list[dict[str, Any]]:
        """The final evaluation, one entry a set."""
        found: list[dict[str, Any]] = self.summary["evaluation"]
        return found

    @property
    def words(self) -> bool:
        """Whether the task has right answers, rather than a text's next tokens."""
        return bool(self.summary["task"] == "word_problem")


def read_run(path: Path, *, label: str | None = None) -> RunRecord:
    """Read the folder of a finished run.

    Raises:
        RunFolderError: the folder is missing, or its run did not finish.

    """
    summary_path = path / "summary.json"
    if not summary_path.is_file():
        if not path.is_dir():
            raise RunFolderError(f"there is no folder {path}; give those of finished runs")
        raise RunFolderError(f"{path} holds no finished run (summary.json is missing); finish it by --resume")
    summary = json.loads(summary_path.read_text(encoding="utf-8"))
    metrics_path = path / "metrics.jsonl"
    rows = read_metrics(metrics_path) if metrics_path.is_file() else ()
    losses = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    return RunRecord(label=label or summary["name"], summary=summary, losses=losses)


def draw(runs: Sequence[RunRecord], output: Path, *, title: str | None = None) -> None:
    """Draw the runs into ``output`` (its ending says the format)."""
    figure = new_figure(width=12.6, height=4.4, title=title or _title(runs))
    answers, search, loss = figure.subplots(1, 3)
    if not any(run.evaluation for run in runs):
        _nothing(answers, "nothing was evaluated: there are no validation data")
    elif all(run.words for run in runs):
        _draw_accuracy(answers, runs)
    else:
        _draw_perplexity(answers, runs)
    _draw_iterations(search, runs)
    _draw_loss(loss, runs)
    for axes in (answers, search, loss):
        tidy(axes)
    write_picture(figure, output)


def _title(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return "  vs  ".join(run.label for run in runs)
    summary = runs[0].summary
    return f"{runs[0].label}: {summary['parameters']:,} parameters, {summary['steps']:,} steps"


def _probabilities(runs: Sequence[RunRecord]) -> list[float | None]:
    found = {row.get("identity_probability") for run in runs for row in run.evaluation}
    return sorted(found, key=lambda p: -1.0 if p is None else -p)


def _look(runs: Sequence[RunRecord], run: int, p: int, *, probabilities: int) -> dict[str, Any]:
    """Return color and line style: runs differ by color and p by style, one run's p by color."""
    if len(runs) == 1:
        return {"color": _COLORS[p % len(_COLORS)], "linestyle": "-", "marker": _MARKERS[p % len(_MARKERS)]}
    style = _STYLES[p % len(_STYLES)] if probabilities > 1 else "-"
    return {"color": _COLORS[run % len(_COLORS)], "linestyle": style, "marker": _MARKERS[p % len(_MARKERS)]}


def _name(runs: Sequence[RunRecord], run: RunRecord, p: float | None) -> str:
    parts = [run.label] if len(runs) > 1 else []
    parts += [f"p = {p:g}"] if p is not None else []
    return ", ".join(parts) or run.label


def _draw_accuracy(axes: Axes, runs: Sequence[RunRecord]) -> None:
    probabilities = _probabilities(runs)
    hollow = False
    for run_index, run in enumerate(runs):
        for p_index, p in enumerate(probabilities):
            rows = sorted(
                (row for row in run.evaluation if row.get("identity_probability") == p),
                key=lambda row: row["length"],
            )
            if not rows:
                continue
            look = _look(runs, run_index, p_index, probabilities=len(probabilities))
            lengths = [row["length"] for row in rows]
            values = [100.0 * row["accuracy_last"] for row in rows]
            marker = look.pop("marker")
            axes.plot(lengths, values, linewidth=1.9, **look)
            for length, value, row in zip(lengths, values, rows, strict=True):
                is_open = (row["non_converged"] or 0.0) > 1.0 - _OPEN_BELOW
                hollow |= is_open
                axes.plot(
                    length,
                    value,
                    marker,
                    markersize=6.5,
                    color=look["color"],
                    markerfacecolor="white" if is_open else look["color"],
                    clip_on=False,
                    zorder=5,
                )
            axes.plot([], [], marker=marker, label=_name(runs, run, p), linewidth=1.9, **look)
    chance = runs[0].summary.get("chance")
    if chance:
        axes.axhline(100.0 * chance, color=GREY, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.annotate(
            "chance", (1.0, 100.0 * chance), xycoords=("axes fraction", "data"), xytext=(-4, -11),
            textcoords="offset points", ha="right", fontsize=8.5, color=GREY,
        )  # fmt: skip
    lengths_axis(axes, sorted({row["length"] for run in runs for row in run.evaluation}))
    _mark_training_length(axes, runs)
    last = runs[0].summary["last_tokens"]
    axes.set_ylim(0, 103)
    axes.set_ylabel(f"accuracy over the last {last} tokens (%)")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_title(
        "Accuracy against length, read at convergence" if _searched(runs) else "Accuracy against length"
    )
    if hollow:
        axes.plot(
            [], [], "o", color=GREY, markerfacecolor="white", label=f"under {_OPEN_BELOW:.0%} converged"
        )
    _legend(axes)


def _draw_perplexity(axes: Axes, runs: Sequence[RunRecord]) -> None:
    for run_index, run in enumerate(runs):
        rows = sorted(run.evaluation, key=lambda row: row["length"])
        points = [(row["length"], row["perplexity"]) for row in rows if row["perplexity"] is not None]
        if points:
            lengths, values = zip(*points, strict=True)
            axes.plot(
                lengths, values, "o-", linewidth=1.9, color=_COLORS[run_index % len(_COLORS)], label=run.label
            )
    lengths_axis(axes, sorted({row["length"] for run in runs for row in run.evaluation}))
    axes.set_ylabel("validation perplexity")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_title("Perplexity against length")
    _mark_training_length(axes, runs)
    _legend(axes)


def _draw_iterations(axes: Axes, runs: Sequence[RunRecord]) -> None:
    probabilities = _probabilities(runs)
    drawn = False
    for run_index, run in enumerate(runs):
        for p_index, p in enumerate(probabilities):
            rows = [row for row in run.evaluation if row.get("identity_probability") == p]
            rows = [row for row in rows if row.get("iterations_by_position")]
            if not rows:
                continue
            row = max(rows, key=lambda row: row["length"])
            values = row["iterations_by_position"]
            look = _look(runs, run_index, p_index, probabilities=len(probabilities))
            look.pop("marker")
            axes.plot(range(1, len(values) + 1), values, linewidth=1.9, label=_name(runs, run, p), **look)
            drawn = True
    axes.set_title("Iterations of a token, by position")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("iterations, mean over the sequences")
    if not drawn:
        _nothing(axes, "no iterations to show")
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
        color = _COLORS[run_index % len(_COLORS)]
        axes.plot(steps, losses, linewidth=0.8, alpha=0.28, color=color)
        # A curve runs through the middle of its points only if it is smoothed on the scale it is drawn on.
        middle = smoothed([math.log(loss) for loss in losses] if logarithmic else losses)
        middle = [math.exp(value) for value in middle] if logarithmic else middle
        axes.plot(steps, middle, linewidth=1.9, color=color, label=run.label)
    if logarithmic:
        axes.set_yscale("log")
    curricula: list[list[dict[str, Any]]] = [run.summary["phases"] for run in runs]
    phases = max(curricula, key=len)
    phases = phases if len(phases) > 1 else []
    if phases:  # a name outside, of a run that ended at once, would leave the panel no room
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    for phase in phases:
        if phase["first_step"] > 0:
            axes.axvline(phase["first_step"], color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(
            phase["name"], (phase["first_step"], 0.0), xycoords=("data", "axes fraction"), xytext=(4, 5),
            textcoords="offset points", fontsize=8.5, color=GREY, rotation=90, va="bottom",
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats a token)")
    axes.set_title("Training loss")
    if len(runs) > 1:
        _legend(axes)


def smoothed(values: Sequence[float], *, share: float = 0.03) -> list[float]:
    """Return the mean of each value's neighbours, so many to both sides that they are ``share`` of all."""
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
        return  # a mark outside would leave the panel no room
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
        axes.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize=9, handlelength=2.6)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m trainer.report", description="Draw runs side by side.")
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    made.add_argument(
        "--output", type=Path, default=Path("report.png"), help="picture to write (default report.png)"
    )
    made.add_argument("--label", action="append", default=[], help="name of a run in the picture, once a run")
    made.add_argument("--title", help="title of the picture")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m trainer.report``; return the exit code."""
    command = parser()
    options = command.parse_args(arguments)
    if options.label and len(options.label) != len(options.runs):
        command.error(f"{len(options.label)} labels for {len(options.runs)} runs; give one a run, or none")
    labels: list[str | None] = options.label or [None] * len(options.runs)
    try:
        records = [read_run(path, label=label) for path, label in zip(options.runs, labels, strict=True)]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draw(records, options.output, title=options.title)
    except (ValueError, OSError) as error:
        return refuse(str(error))
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return refuse(f"matplotlib is not installed; {install_extra('train')}")
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
