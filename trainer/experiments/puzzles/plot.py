"""Plot of the puzzles experiment: solved share against iterations, for several numbers of starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.reporting.pictures import BLUE, GREEN, GREY, ORANGE, finish, lengths_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draw the solved share against the maximum number of iterations, a line per number of starts."""
    figure = new_figure(width=6.4, height=4.2, title=title)
    axes = figure.subplots()
    most = [row["max_iterations"] for row in rows]
    starts = list(rows[0]["solved"])
    shades = [0.35 + 0.65 * (index + 1) / len(starts) for index in range(len(starts))]
    for count, shade in zip(starts, shades, strict=True):
        solved = [100 * row["solved"][count] for row in rows]
        label = "one start" if count == 1 else f"surest of {count} starts"
        axes.plot(most, solved, "o-", color=BLUE if count == 1 else ORANGE, alpha=shade, label=label)
    axes.plot(most, [100 * row["converged"] for row in rows], ":", color=GREY, label="converged, one start")
    axes.plot(most, [100 * row["solved_by_any"] for row in rows], "--", color=GREEN, label="any start")
    axes.set_ylim(-3, 103)
    lengths_axis(axes, most)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    finish(axes, title="Solved boards", x="maximum number of iterations", y="boards (%)")
    return figure
