"""The picture of the CatbAbI experiment: all answers by model, and each task's."""

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
"""Of training, and tokens in the rows that were asked."""
MODES = {"answers": "QA mode", "all": "LM mode"}
MOST = 0.9
"""Share of converged tokens below which a bar is hatched: its accuracy is not that of fixed points."""


def draw(written: Mapping[str, Any]) -> Figure:
    """Draw accuracies of all answers, and of each task's, the mean over seeds."""
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
    below = 1.0 + 0.28 * len(lines)  # inches for the tasks
    figure = new_figure(
        width=12.4, height=5.2 + below, title=f"CatbAbI, {written['split']} split: accuracy of the answers"
    )
    bars, heat = figure.subplots(2, 1, height_ratios=(4.8, below))
    _draw_models(bars, rows, names, modes)
    _draw_published(bars, written["published"])
    finish(
        bars, title="All answers; dotted: as published elsewhere", x="model and layers", y="right answers, %"
    )
    _draw_tasks(heat, rows, lines)
    return figure


def _draw_models(
    axes: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str], modes: Sequence[Mode]
) -> None:
    """Draw the accuracy of all answers: a bar for each model and mode, a dot for each seed."""
    from matplotlib.patches import Patch

    colors = (BLUE, ORANGE, GREEN, GREY)
    for index, mode in enumerate(modes):
        known = [name for name in names if any(_is(row, name, mode) for row in rows)]
        for name in known:
            found = [100 * row["accuracy"] for row in rows if _is(row, name, mode)]
            at = names.index(name) + (index - (len(modes) - 1) / 2) * 0.8 / len(modes)
            mean = sum(found) / len(found)
            color = colors[index % len(colors)]
            open_ = any(_open(row) for row in rows if _is(row, name, mode))
            axes.bar(
                at,
                mean,
                0.8 / len(modes) * 0.94,
                color=color,
                alpha=0.85,
                hatch="///" if open_ else None,
                edgecolor="white",
                linewidth=0,
            )
            axes.plot([at] * len(found), found, ".", color="black", markersize=4)
            axes.annotate(
                f"{mean:.1f}",
                (at, max(found)),  # above the dots of the seeds
                xytext=(0, 3),
                textcoords="offset points",
                rotation=0 if len(names) * len(modes) <= 8 else 90,  # many stand too near to lie
                ha="center",
                va="bottom",
                fontsize=8,
                zorder=5,
            )
    axes.set_xlim(-0.6, 1.12 * len(names) - 0.4)  # room for the names of the lines
    # Many names side by side run into each other: they are broken where they can be.
    broken = [name.replace("-", "\n").replace(", ", "\n") for name in names]
    axes.set_xticks(range(len(names)), names if len(names) <= 4 else broken)
    axes.set_ylim(0, 126)
    shown = [
        Patch(color=colors[index % len(colors)], alpha=0.85, label=_mode(mode, rows))
        for index, mode in enumerate(modes)
    ]
    if any(_open(row) for row in rows):
        hatched = f"with a seed where under {MOST:.0%} of the tokens converged"
        shown.append(Patch(facecolor=GREY, hatch="///", edgecolor="white", linewidth=0, label=hatched))
    axes.legend(handles=shown, frameon=False, fontsize=9, loc="upper center", ncols=3)


def _draw_published(axes: Axes, published: Mapping[str, float]) -> None:
    """Draw a line for each accuracy that others published, its name at the right."""
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
    """Draw each task's accuracy as a field, the mean over seeds: a line for each model and mode."""
    values = torch.full((len(lines), len(TASKS)), torch.nan)
    for line, model in enumerate(lines):
        for column, task in enumerate(TASKS):
            known = [one["by_task"][str(task)] for one in rows if _is(one, *model)]
            found = [value for value in known if value is not None]
            values[line, column] = 100 * sum(found) / len(found) if found else torch.nan
    # From dark to bright, which everybody sees; red to green is one color to some.
    axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for line, column in (~values.isnan()).nonzero().tolist():
        value = float(values[line, column])
        color = "white" if value < 60 else "black"
        axes.text(column, line, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(TASKS)), [str(task) for task in TASKS])
    axes.set_yticks(range(len(lines)), [f"{name}, {_mode(mode, rows)}" for name, mode in lines])
    axes.set_title("By task: right answers, %", fontsize=11)
    axes.set_xlabel("bAbI task")


def _is(row: Mapping[str, Any], name: str, mode: Mode) -> bool:
    return (row["model"], (row["scoring"], row["length"])) == (name, mode)


def _open(row: Mapping[str, Any]) -> bool:
    return row.get("search") is not None and row["search"]["converged"] < MOST


def _mode(mode: Mode, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how a mode is called; the length of the rows is said where there are several."""
    return MODES[mode[0]] + (f", rows of {mode[1]}" if len({row["length"] for row in rows}) > 1 else "")
