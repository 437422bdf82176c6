"""The heat map of iterations: positions against the evaluations of a run, for the dashboards of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_COLUMNS = 256
"""Longer sequences are shown as means over neighboring positions."""
_MOST_ROWS = 512
"""Only the latest evaluations are shown."""


class IterationMap:
    """Collects the iterations per position of a run's evaluations, and draws them.

    A set is shown if it is the longest of its kind and its search counts iterations per token. A resumed run
    begins a new map: the earlier pictures remain in the dashboard.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int, NDArray[np.float64]]]] = {}
        """By the name of the set: step, length, and the means of the columns."""

    def add(self, step: int, results: Sequence[EvaluationResult]) -> list[str]:
        """Add an evaluation; return the names of the sets that have a map."""
        longest: dict[str, EvaluationResult] = {}
        for result in results:
            kind = result.name.removesuffix(f"L{result.length}")
            if result.iterations_by_position and (
                kind not in longest or result.length > longest[kind].length
            ):
                longest[kind] = result
        for result in longest.values():
            rows = self._rows.setdefault(result.name, [])
            rows.append((step, result.length, _columns(result.iterations_by_position or ())))
            del rows[:-_MOST_ROWS]
        return [result.name for result in longest.values()]

    def draw(self, name: str) -> Figure:
        """Return the map of a set: one row per evaluation, the first at the bottom."""
        rows = self._rows[name]
        steps, length = [step for step, _, _ in rows], rows[-1][1]
        figure = new_figure(width=7.2, height=3.6, title="")
        axes = figure.subplots()
        picture = axes.imshow(
            np.stack([columns for _, _, columns in rows]),
            origin="lower", aspect="auto", interpolation="nearest", cmap="viridis",
            extent=(0.5, length + 0.5, -0.5, len(rows) - 0.5),
        )  # fmt: skip
        ticks = sorted({round(each) for each in np.linspace(0, len(rows) - 1, min(len(rows), 8))})
        axes.set_yticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("step of the evaluation")
        axes.set_title(f"Iterations per token, {name}", fontsize=11)
        figure.colorbar(picture, ax=axes, label="iterations (mean over sequences)")
        return figure

    def pixels(self, name: str) -> NDArray[np.uint8]:
        """Return the map of a set as an RGB image (height, width, 3)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas: Any = FigureCanvasAgg(self.draw(name))  # matplotlib leaves its methods without types
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _columns(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the values, or the means over equal shares of them if there are too many."""
    shares = np.array_split(np.asarray(values, dtype=np.float64), min(len(values), _MOST_COLUMNS))
    return np.array([share.mean() for share in shares])
