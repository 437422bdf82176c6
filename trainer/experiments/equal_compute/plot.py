"""The picture: perplexity against FLOPs, parameters and epochs, with the frontier of explicit models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.reporting.pictures import BLUE, GREY, ORANGE, finish, new_figure, plain_logarithm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AXES = (
    ("flops", "executed training PFLOP", 1e15),
    ("parameters", "parameters (millions)", 1e6),
    ("epochs", "epochs of the text", 1.0),
)


def draw(written: Mapping[str, Any]) -> Figure:
    """Draw one row of panels per family and budget: all runs, the reported ones filled.

    The line is the frontier of the explicit models: the lowest perplexity up to a value of the axis,
    over all their runs, those of the choice included, which favours them. Runs with marks are crosses.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    runs = [run for run in written["runs"] if run["report"] is not None]
    reported = {
        name for one in written["comparisons"] for side in one["sides"].values() for name in side["runs"]
    }
    groups = sorted({(run["recipe"]["family"], run["recipe"]["petaflops"]) for run in runs})
    figure = new_figure(
        width=12.8,
        height=0.8 + 3.4 * max(1, len(groups)),
        title="Perplexity on held-out books: implicit models and the frontier of explicit ones",
    )
    panels = figure.subplots(max(1, len(groups)), len(_AXES), squeeze=False)
    for row, group in zip(panels, groups, strict=False):
        own = [run for run in runs if (run["recipe"]["family"], run["recipe"]["petaflops"]) == group]
        for axes, (key, label, unit) in zip(row, _AXES, strict=True):
            known = [run for run in own if run[key] is not None]
            for side, color in (("explicit", GREY), ("implicit", ORANGE)):
                for run in (one for one in known if one["side"] == side):
                    best, marked = run["name"] in reported, bool(run["marks"])
                    axes.plot(
                        run[key] / unit,
                        run["report"],
                        marker="x" if marked else "o",
                        color=color,
                        markerfacecolor=color if best else "white",
                        markersize=7 if best else 5,
                        linestyle="none",
                        zorder=3,
                    )
            line = frontier([(run[key] / unit, run["report"]) for run in known if run["side"] == "explicit"])
            if line:  # the lowest perplexity holds for all larger values
                line.append((max(run[key] / unit for run in known), line[-1][1]))
            axes.plot([x for x, _ in line], [y for _, y in line], color=BLUE, drawstyle="steps-post")
            if key == "flops":  # runs with one budget differ by less than a step
                axes.set_xlim(0, 1.1 * max(run[key] / unit for run in known))
            axes.xaxis.set_major_locator(MaxNLocator(5))
            plain_logarithm(axes, "y", about=6)
            finish(axes, title=f"{group[0]}, {group[1]:g} PFLOP", x=label, y="perplexity")
    names = {
        "implicit": (ORANGE, "o"),
        "explicit": (GREY, "o"),
        "marked run, for example with unconverged tokens": ("black", "x"),
        "frontier of explicit models": (BLUE, ""),
    }
    lines = [
        Line2D([], [], color=color, marker=marker, linestyle="" if marker else "-")
        for color, marker in names.values()
    ]
    figure.legend(lines, list(names), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto frontier: the points below all points further left, from left to right."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found
