"""How pictures look, and how they are written: whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.storage.files import replacing, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY, DARK = "#2b6cb0", "#d9730d", "#2f855a", "#5a6472", "#1f2933"


def new_figure(*, width: float, height: float, title: str) -> Figure:
    """Return an empty figure, its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own canvas: no global pyplot state, no window system, nothing to close.
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=DARK)
    return figure


def finish(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Label a panel with lines in it."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Give a panel with lines in it its looks."""
    axes.title.set_fontsize(11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa5b1")
    axes.tick_params(colors="#3e4c59", labelsize=9)
    axes.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def plain_logarithm(
    axes: Axes, which: str, *, at: Sequence[float] | None = None, about: int | None = None
) -> None:
    """Make an axis logarithmic with few, plainly written ticks: round values, these, or about so many.

    ``about`` is for a narrow range, in which 1, 2, 5, 10 and the like may miss altogether.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
    if about is not None:
        axis.set_major_locator(MaxNLocator(about))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if at is None else FixedLocator(at))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def lengths_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Scale the x axis by factors of two and mark exactly the lengths that were measured."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(length) for length in lengths]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(length) for length in lengths])
    axes.set_xlim(min(lengths) / 1.15, max(lengths) * 1.15)


def write_results(
    folder: Path, name: str, written: dict[str, Any], draw: Callable[[dict[str, Any]], Figure]
) -> str:
    """Write an experiment's numbers, then draw and write its picture; return the line that says where."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, picture = folder / f"{name}.json", folder / f"{name}.png"
    write_json(numbers, written)
    write_picture(draw(written), picture)
    return f"written: {numbers}, {picture}"


def write_picture(figure: Figure, path: Path) -> None:
    """Write it through a temporary file beside it; the ending says the format."""
    with replacing(path) as file:
        figure.savefig(file, dpi=140, format=path.suffix.removeprefix(".") or "png")
