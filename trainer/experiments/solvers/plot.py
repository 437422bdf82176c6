"""Plot of the solver study: iterations against tolerance, time and work, contraction, Jacobian penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.reporting.pictures import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    finish,
    new_figure,
    plain_logarithm,
    write_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinguishable with red-green color blindness; markers help where lines cross.
_COLORS = (BLUE, ORANGE, GREEN, DARK, "#63b3ed", "#d68fb8", "#ecc94b")
_LINES = ("-", "--", ":")
_MARKERS = "os^Dv"


def draw(one: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> None:
    """Draw one model's results: iterations, the cost of all configurations, the spectral radii."""
    from matplotlib.ticker import MaxNLocator

    rows = one["rows"]
    height = max(7.4, 0.21 * len({(row["config"], row["scope"]) for row in rows}) + 2.4)
    text = f"{one['sequences']} sequences of {one['length']} tokens, {settings['device_name']}"
    figure = new_figure(width=12.6, height=height, title=f"{one['run']}: {text}")
    together = [row for row in rows if _together(row["config"])]
    several = len({row["tolerance"] for row in together}) > 1  # a single tolerance gives no curves
    penalties = "penalties" if one["penalties"] else "cost"
    layout: list[Any] = [["radii", penalties]]
    if several:
        layout = [["prefix", "cost"], ["sequence", "cost"], *layout]
    elif one["penalties"]:
        layout = [["radii", "cost"], [penalties, "cost"]]
    panels = figure.subplot_mosaic(layout, width_ratios=(1.0, 1.15))
    styles = {
        name: (_COLORS[index % 7], _LINES[index // 7 % 3], _MARKERS[index % 5])
        for index, name in enumerate(dict.fromkeys(row["config"] for row in together))
    }
    for scope in ("prefix", "sequence") if several else ():
        axes = panels[scope]
        _iterations(axes, [row for row in together if row["scope"] == scope], styles, scope)
        counts = [row["iterations_mean"] for row in together]
        axes.set_ylim(0.85 * min(counts), 1.18 * max(counts))
    if several:
        figure.legend(
            *panels["prefix"].get_legend_handles_labels(), loc="outside lower left", ncols=5, frameon=False,
            fontsize=9,
        )  # fmt: skip
    _cost(panels["cost"], rows)
    radii = panels["radii"]
    radii.hist(one["spectrum"]["radii"], bins=24, color=BLUE)
    radii.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    radii.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    finish(
        radii, title="Contraction of the map, by token", x="spectral radius at the fixed point", y="tokens"
    )
    if one["penalties"]:
        _penalties(panels["penalties"], one["penalties"])
    write_picture(figure, path)


def _iterations(
    axes: Axes, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, tuple[str, str, str]], scope: str
) -> None:
    """Draw the iterations of whole-sequence searches; hollow markers: not all converged."""
    for name, (color, line, marker) in styles.items():
        of_way = [row for row in rows if row["config"] == name]
        x, y = [row["tolerance"] for row in of_way], [row["iterations_mean"] for row in of_way]
        axes.plot([], [], line + marker, color=color, label=name, linewidth=1.4, markersize=5)
        axes.plot(x, y, line, color=color, linewidth=1.4)
        for row, left, up in zip(of_way, x, y, strict=True):
            face = color if row["converged"] == 1 else "white"
            axes.plot([left], [up], marker, color=color, markerfacecolor=face, markersize=5)
    axes.set_xscale("log")
    plain_logarithm(axes, "y")
    axes.invert_xaxis()
    finish(
        axes,
        title=f"Scope {scope} (hollow: not all converged)",
        x="tolerance (tighter to the right)",
        y="iterations, mean",
    )


def _together(name: str) -> bool:
    return not any(part in name for part in ("windows", "token by token", "committed"))


def _cost(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the time at the tightest tolerance that any configuration reached; hatched: not all converged."""
    reached = [row["tolerance"] for row in rows if row["converged"] == 1] or [
        row["tolerance"] for row in rows
    ]
    bars = [row for row in rows if row["tolerance"] == min(reached)]
    for place, row in enumerate(reversed(bars)):
        whole = row["converged"] == 1
        axes.barh(
            place,
            row["seconds"],
            color=(BLUE if row["scope"] == "prefix" else GREEN) if whole else "#e4e7eb",
            hatch=None if whole else "//",
            edgecolor="white" if whole else "#9aa5b1",
        )
        axes.text(
            row["seconds"], place, f" {row['work']:.0f}", va="center", fontsize=8, color=DARK, clip_on=True
        )
    axes.set_yticks(range(len(bars)), [f"{row['config']}, {row['scope']}" for row in reversed(bars)])
    finish(axes, title=f"Time to {min(reached):g} (number: calls per token)", x="seconds", y="")
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.12, y=0.01)


def _penalties(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw iterations against the penalty weight at each tolerance, with the loss."""
    names = [
        f"{'before' if row['weight'] is None else format(row['weight'], 'g')}\nloss {row['loss']:.3g}"
        for row in rows
    ]
    for color, tolerance in zip(_COLORS, rows[0]["iterations"], strict=False):
        counts = [row["iterations"][tolerance] for row in rows]
        axes.plot(names, counts, "o-", color=color, label=f"to {tolerance}")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.legend(frameon=False, fontsize=8)
    finish(axes, title="With a Jacobian penalty", x="weight", y="iterations, mean")
