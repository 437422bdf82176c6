"""Style of plots, and writing them atomically."""

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
    """Return an empty figure of the given size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure with its own canvas needs no global pyplot state, no window system and no closing.
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color=DARK)
    return figure


def finish(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Set title and labels of a panel, and style it."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Style a panel."""
    axes.title.set_fontsize(11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa5b1")
    axes.tick_params(colors="#3e4c59", labelsize=9)
    axes.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def plain_logarithm(
    axes: Axes, which: str, *, at: Sequence[float] | None = None, about: int | None = None
) -> None:
    """Make an axis logarithmic with few plain ticks: round values, those in ``at``, or ``about`` many.

    ``about`` is for narrow ranges that may contain none of 1, 2, 5, 10 and so on.
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
    """Make the x axis logarithmic with base two, with ticks at exactly the measured lengths."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(length) for length in lengths]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(length) for length in lengths])
    axes.set_xlim(min(lengths) / 1.15, max(lengths) * 1.15)


def write_results(
    folder: Path, name: str, written: dict[str, Any], draw: Callable[[dict[str, Any]], Figure]
) -> str:
    """Write an experiment's numbers and plot; return a line with their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, picture = folder / f"{name}.json", folder / f"{name}.png"
    write_json(numbers, written)
    write_picture(draw(written), picture)
    return f"written: {numbers}, {picture}"


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure atomically through a temporary file; the suffix selects the format."""
    with replacing(path) as file:
        figure.savefig(file, dpi=140, format=path.suffix.removeprefix(".") or "png")
