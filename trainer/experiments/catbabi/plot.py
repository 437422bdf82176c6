"""Plot of the CatbAbI experiment: overall accuracy by model, and accuracy per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.babi import TASKS
from trainer.reporting.pictures import BLUE, GREEN, GREY, ORANGE, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mode = tuple[str, int]
"""Training loss, and tokens per scored row."""
MODES = {"answers": "QA mode", "all": "LM mode"}
MOST = 0.9
"""Fraction of converged tokens below which a bar is hatched: its accuracy is not that of fixed points."""


def draw(written: Mapping[str, Any]) -> Figure:
    """Draw the overall accuracy and the accuracy per task, averaged over seeds."""
    rows: list[dict[str, Any]] = written["models"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    modes = [
        (mode, length)
        for mode in dict.fromkeys(row["scoring"] for row in rows)
        for length in lengths
        if any((row["scoring"], row["length"]) == (mode, length) for row in rows)
    ]
    names = list(dict.fromkeys(row["model"] for row in rows))
    lines = [(name, mode) for mode in modes for name in names if any(_is(row, name, mode) for row in rows)]
    below = 1.0 + 0.28 * len(lines)  # height of the task panel, in inches
    figure = new_figure(
        width=12.4, height=5.2 + below, title=f"CatbAbI, {written['split']} split: accuracy of the answers"
    )
    bars, heat = figure.subplots(2, 1, height_ratios=(4.8, below))
    _draw_models(bars, rows, names, modes)
    _draw_published(bars, written["published"])
    finish(bars, title="All answers (dotted: published results)", x="model and layers", y="accuracy (%)")
    _draw_tasks(heat, rows, lines)
    return figure


def _draw_models(
    axes: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str], modes: Sequence[Mode]
) -> None:
    """Draw the overall accuracy: a bar per model and mode, a dot per seed."""
    from matplotlib.patches import Patch

    colors = (BLUE, ORANGE, GREEN, GREY)
    for index, mode in enumerate(modes):
        known = [name for name in names if any(_is(row, name, mode) for row in rows)]
        for name in known:
            found = [100 * row["accuracy"] for row in rows if _is(row, name, mode)]
            at = names.index(name) + (index - (len(modes) - 1) / 2) * 0.8 / len(modes)
            mean = sum(found) / len(found)
            color = colors[index % len(colors)]
            unconverged = any(_is_unconverged(row) for row in rows if _is(row, name, mode))
            axes.bar(
                at,
                mean,
                0.8 / len(modes) * 0.94,
                color=color,
                alpha=0.85,
                hatch="///" if unconverged else None,
                edgecolor="white",
                linewidth=0,
            )
            axes.plot([at] * len(found), found, ".", color="black", markersize=4)
            axes.annotate(
                f"{mean:.1f}",
                (at, max(found)),  # above the seeds' dots
                xytext=(0, 3),
                textcoords="offset points",
                rotation=0 if len(names) * len(modes) <= 8 else 90,  # rotated if there are many
                ha="center",
                va="bottom",
                fontsize=8,
                zorder=5,
            )
    axes.set_xlim(-0.6, 1.12 * len(names) - 0.4)  # leave room for the labels of the lines
    # Break long names so that neighbors do not overlap.
    broken = [name.replace("-", "\n").replace(", ", "\n") for name in names]
    axes.set_xticks(range(len(names)), names if len(names) <= 4 else broken)
    axes.set_ylim(0, 126)
    handles = [
        Patch(color=colors[index % len(colors)], alpha=0.85, label=_mode(mode, rows))
        for index, mode in enumerate(modes)
    ]
    if any(_is_unconverged(row) for row in rows):
        hatched = f"under {MOST:.0%} of the tokens converged (any seed)"
        handles.append(Patch(facecolor=GREY, hatch="///", edgecolor="white", linewidth=0, label=hatched))
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper center", ncols=3)


def _draw_published(axes: Axes, published: Mapping[str, float]) -> None:
    """Draw a line per published accuracy, labeled on the right."""
    above = -math.inf
    for name, value in sorted(published.items(), key=lambda one: one[1]):
        axes.axhline(100 * value, color=GREY, linewidth=0.8, linestyle=":")
        under = "4" in name  # two of them nearly coincide
        place = 100 * value if under else max(100 * value, above + 4.4)
        above = above if under else place
        axes.text(
            0.99,
            place,
            name,
            transform=axes.get_yaxis_transform(),
            fontsize=7.5,
            color=GREY,
            va="top" if under else "bottom",
            ha="right",
        )


def _draw_tasks(axes: Axes, rows: Sequence[Mapping[str, Any]], lines: Sequence[tuple[str, Mode]]) -> None:
    """Draw a heat map of the accuracy per task, averaged over seeds, one row per model and mode."""
    values = torch.full((len(lines), len(TASKS)), torch.nan)
    for line, model in enumerate(lines):
        for column, task in enumerate(TASKS):
            known = [one["by_task"][str(task)] for one in rows if _is(one, *model)]
            found = [value for value in known if value is not None]
            values[line, column] = 100 * sum(found) / len(found) if found else torch.nan
    # A perceptually uniform map, readable with color blindness.
    axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for line, column in (~values.isnan()).nonzero().tolist():
        value = float(values[line, column])
        color = "white" if value < 60 else "black"
        axes.text(column, line, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(TASKS)), [str(task) for task in TASKS])
    axes.set_yticks(range(len(lines)), [f"{name}, {_mode(mode, rows)}" for name, mode in lines])
    axes.set_title("Accuracy per task (%)", fontsize=11)
    axes.set_xlabel("bAbI task")


def _is(row: Mapping[str, Any], name: str, mode: Mode) -> bool:
    return (row["model"], (row["scoring"], row["length"])) == (name, mode)


def _is_unconverged(row: Mapping[str, Any]) -> bool:
    return row.get("search") is not None and row["search"]["converged"] < MOST


def _mode(mode: Mode, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the label of a mode, with the row length if there are several."""
    return MODES[mode[0]] + (f", rows of {mode[1]}" if len({row["length"] for row in rows}) > 1 else "")
