"""The plot of a sweep: the metric against the values of one axis, with a line for each other setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.reporting.pictures import BLUE, DARK, GREEN, GREY, ORANGE, finish, new_figure
from trainer.sweep.grid import Axis, describe_value, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = (BLUE, ORANGE, GREEN, "#805ad5", "#b83280", "#718096")
_MOST_NAMED = 14
"""Maximum number of lines in the legend."""


def draw_sweep(written: Mapping[str, Any], axes: Sequence[Axis]) -> Figure:
    """Return the plot of the contents of ``sweep.json``.

    The horizontal axis is the longest numeric one, otherwise the first. Dots are runs, lines connect the
    means over seeds, hollow points are marked in the table, and a star is the best cell.
    """
    figure = new_figure(width=7.6, height=4.8, title=f"Sweep of {written['spec']}")
    panel = figure.subplots()
    names = short_names([axis.key for axis in axes])
    main = max(axes, key=lambda axis: (axis.is_numeric, len(axis.values)), default=None)
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for cell in written["cells"]:
        others = [axis for axis in axes if axis is not main and len(axis.values) > 1]
        label = tuple(f"{names[axis.key]} {describe_value(cell['settings'][axis.key])}" for axis in others)
        lines.setdefault(label, []).append(cell)
    for index, label in enumerate(sorted(lines)):
        name = ", ".join(label) if len(lines) <= _MOST_NAMED else ""
        _draw_line(panel, lines[label], main, label=name, color=_color(index, of=len(lines)))
    _mark_best(panel, written["best"], main)
    if main is not None:
        _scale(panel, main)
    x = "" if main is None else names[main.key]
    finish(panel, title=f"{written['metric']}, {written['better']} is better", x=x, y=written["metric"])
    if any(cell["values"] and cell["marks"] for cell in written["cells"]):
        panel.plot([], [], "o", color=GREY, markerfacecolor="white", label="marked in the table")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize=8.5)
    return figure


def _draw_line(
    panel: Axes, cells: Sequence[Mapping[str, Any]], main: Axis | None, *, label: str, color: Any
) -> None:
    found = sorted((cell for cell in cells if cell["values"]), key=lambda cell: _position(main, cell))
    places = [_position(main, cell) for cell in found]
    panel.plot(places, [cell["mean"] for cell in found], linewidth=1.6, color=color, label=label or None)
    for place, cell in zip(places, found, strict=True):
        panel.plot([place] * len(cell["values"]), cell["values"], ".", markersize=4, color=color, alpha=0.5)
        hollow = bool(cell["marks"])
        face = "white" if hollow else color
        panel.plot([place], [cell["mean"]], "o", markersize=6, color=color, markerfacecolor=face, zorder=4)


def _mark_best(panel: Axes, best: Mapping[str, Any] | None, main: Axis | None) -> None:
    if best is not None:
        panel.plot(
            [_position(main, best)], [best["mean"]], "*", markersize=15, color=DARK, markerfacecolor="none",
            zorder=5, label="best",
        )  # fmt: skip


def _position(main: Axis | None, cell: Mapping[str, Any]) -> float:
    """Return where a cell stands on the horizontal axis: at its number, or at the index of its value."""
    if main is None:
        return 0.0
    value = cell["settings"][main.key]
    return float(value) if main.is_numeric else float(main.values.index(value))


def _scale(panel: Axes, main: Axis) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    places = [float(v) for v in main.values] if main.is_numeric else list(map(float, range(len(main.values))))
    wide = main.is_numeric and min(places) > 0 and max(places) >= 4 * min(places)
    if wide:
        panel.set_xscale("log")
    panel.xaxis.set_major_locator(FixedLocator(places))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([describe_value(value) for value in main.values])


def _color(index: int, *, of: int) -> Any:
    if of <= len(_COLORS):
        return _COLORS[index]
    from matplotlib import colormaps

    return GREY if of > _MOST_NAMED else colormaps["turbo"]((index + 0.5) / of)
