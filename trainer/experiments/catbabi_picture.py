"""The picture of the CatbAbI experiment: all answers by model, and each task's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.babi import TASKS
from trainer.experiments.drawing import BLUE, GREEN, GREY, ORANGE, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = {"answers": "QA mode", "all": "LM mode"}


def draw(written: Mapping[str, Any]) -> Figure:
    """Draw accuracies of all answers, and of each task's, the mean over seeds."""
    rows: list[dict[str, Any]] = written["models"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    modes = [  # of training, and tokens in the rows that were asked
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
    colors = (BLUE, ORANGE, GREEN, GREY)
    for index, mode in enumerate(modes):
        known = [name for name in names if any(_is(row, name, mode) for row in rows)]
        for name in known:
            found = [100 * row["accuracy"] for row in rows if _is(row, name, mode)]
            place = names.index(name)
            at = place + (index - (len(modes) - 1) / 2) * 0.8 / len(modes)
            label = _mode(mode, lengths) if name == known[0] else None
            mean = sum(found) / len(found)
            color = colors[index % len(colors)]
            bars.bar(at, mean, 0.8 / len(modes) * 0.94, color=color, alpha=0.85, label=label)
            bars.plot([at] * len(found), found, ".", color="black", markersize=4)
            bars.annotate(
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
    above = -math.inf
    for name, value in sorted(written["published"].items(), key=lambda one: one[1]):
        bars.axhline(100 * value, color=GREY, linewidth=0.8, linestyle=":")
        under = "4" in name  # two of them nearly coincide
        place = 100 * value if under else max(100 * value, above + 4.4)
        above = above if under else place
        bars.text(
            0.99,
            place,
            name,
            transform=bars.get_yaxis_transform(),
            fontsize=7.5,
            color=GREY,
            va="top" if under else "bottom",
            ha="right",
        )
    bars.set_xlim(-0.6, 1.12 * len(names) - 0.4)  # room for the names of the lines
    # Many names side by side run into each other: they are broken where they can be.
    broken = [name.replace("-", "\n").replace(", ", "\n") for name in names]
    bars.set_xticks(range(len(names)), names if len(names) <= 4 else broken)
    bars.set_ylim(0, 126)
    finish(
        bars, title="All answers; dotted: as published elsewhere", x="model and layers", y="right answers, %"
    )
    bars.legend(frameon=False, fontsize=9, loc="upper center", ncols=4)
    values = torch.full((len(lines), len(TASKS)), torch.nan)
    for row in range(len(lines)):
        for column, task in enumerate(TASKS):
            found = [
                one["by_task"][str(task)]
                for one in rows
                if _is(one, *lines[row]) and one["by_task"][str(task)] is not None
            ]
            values[row, column] = 100 * sum(found) / len(found) if found else torch.nan
    # From dark to bright, which everybody sees; red to green is one color to some.
    heat.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for row in range(len(lines)):
        for column in range(len(TASKS)):
            if not values[row, column].isnan():
                color = "white" if values[row, column] < 60 else "black"
                text = f"{values[row, column]:.0f}"
                heat.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    heat.set_xticks(range(len(TASKS)), [str(task) for task in TASKS])
    heat.set_yticks(range(len(lines)), [f"{name}, {_mode(mode, lengths)}" for name, mode in lines])
    heat.set_title("By task: right answers, %", fontsize=11)
    heat.set_xlabel("bAbI task")
    return figure


def _is(row: Mapping[str, Any], name: str, mode: tuple[str, int]) -> bool:
    return (row["model"], (row["scoring"], row["length"])) == (name, mode)


def _mode(mode: tuple[str, int], lengths: Sequence[int]) -> str:
    """Return how a mode is called; the rows' length is said where there are several."""
    return MODES[mode[0]] + (f", rows of {mode[1]}" if len(lengths) > 1 else "")
