"""Plot of an evaluation: scores against the maximum number of iterations, perplexity against length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.pictures import (
    BLUE,
    DARK,
    GREEN,
    ORANGE,
    lengths_axis,
    new_figure,
    tidy,
    write_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trainer.evaluation.scores import Scores

_COLORS = (BLUE, ORANGE, GREEN, "#805ad5", "#b83280", "#718096", "#b7791f", "#2c7a7b", "#c53030")

Panel = Callable[["Axes"], None]


def panels(found: Sequence[Scores], lengths: Sequence[EvaluationResult]) -> list[Panel]:
    """Return the panels to draw; empty for a single budget of iterations and at most one length."""
    drawn: list[Panel] = []
    whole = [
        scores for scores in found if len(scores.tasks) == len(found[0].tasks)
    ]  # excludes a budget that was interrupted
    budgets = [scores for scores in whole if scores.self_iterations is not None]
    if len(budgets) > 1:
        headers = list(budgets[0].columns())
        perplexities = [header for header in headers if "ppl" in header or "perplexity" in header]
        accuracies = [header for header in headers if header not in perplexities]
        if accuracies:
            drawn.append(lambda axes: _draw_scores(axes, budgets, accuracies, "Accuracy"))
        if perplexities:
            drawn.append(lambda axes: _draw_scores(axes, budgets, perplexities, "Perplexity"))
        drawn.append(lambda axes: _draw_search(axes, budgets))
    if len({result.settings.get("self_iterations") for result in lengths}) > 1:
        drawn.append(lambda axes: _draw_budgets(axes, lengths))
    if len({result.length for result in lengths}) > 1:
        drawn.append(lambda axes: _draw_lengths(axes, lengths))
    return drawn


def draw(drawn: Sequence[Panel], output: Path, *, title: str) -> None:
    """Draw the panels side by side and write them atomically to ``output``."""
    figure = new_figure(width=5.4 * len(drawn), height=4.7, title=title)
    for axes, panel in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        panel(axes)
        tidy(axes)
    write_picture(figure, output)


def _draw_scores(axes: Axes, budgets: Sequence[Scores], headers: Sequence[str], what: str) -> None:
    steps = [_budget(scores) for scores in budgets]
    seen: list[float] = []
    for number, header in enumerate(headers):
        mean = header == "mean"
        color = DARK if mean else _COLORS[number % len(_COLORS)]
        values = [scores.columns()[header] for scores in budgets]
        axes.plot(steps, values, "o-", color=color, linewidth=2.6 if mean else 1.7, label=header)
        seen += values
    if what == "Perplexity" and max(seen) > 5 * min(seen):
        axes.set_yscale("log")
    _iterations_axis(axes, steps)
    axes.set_ylabel(what.lower())
    axes.set_title(f"{what} against self-iterations")
    _legend(axes)


def _draw_search(axes: Axes, budgets: Sequence[Scores]) -> None:
    steps = [_budget(scores) for scores in budgets]
    for number, task in enumerate(budgets[0].tasks):
        tallies = [scores.tasks[number].search for scores in budgets]
        points = [
            (step, 100.0 * (1.0 - tally.non_converged))
            for step, tally in zip(steps, tallies, strict=True)
            if tally is not None
        ]
        if points:
            color = _COLORS[number % len(_COLORS)]
            axes.plot(*zip(*points, strict=True), "o-", color=color, linewidth=1.7, label=task.name)
    _iterations_axis(axes, steps)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("converged sequences (%)")
    axes.set_title("Convergence against self-iterations")
    _legend(axes)


def _draw_lengths(axes: Axes, lengths: Sequence[EvaluationResult]) -> None:
    budgets = sorted({result.settings.get("self_iterations", 0) for result in lengths})
    for color, budget in zip(cycle(_COLORS), budgets, strict=False):
        own = [result for result in lengths if result.settings.get("self_iterations", 0) == budget]
        label = f"{budget:g} self-iteration{'s' if budget > 1 else ''}"
        points = [(result.length, result.perplexity) for result in own]
        axes.plot(*zip(*points, strict=True), "o-", color=color, linewidth=1.9, label=label)
    if len(budgets) > 1:
        _legend(axes)
    lengths_axis(axes, sorted({result.length for result in lengths}))
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("perplexity")
    axes.set_title("Perplexity against length")


def _draw_budgets(axes: Axes, lengths: Sequence[EvaluationResult]) -> None:
    for color, length in zip(cycle(_COLORS), sorted({result.length for result in lengths}), strict=False):
        points = [(r.settings["self_iterations"], r.perplexity) for r in lengths if r.length == length]
        axes.plot(*zip(*points, strict=True), "o-", color=color, linewidth=1.9, label=f"length {length}")
    _iterations_axis(axes, sorted({int(result.settings["self_iterations"]) for result in lengths}))
    axes.set_ylabel("perplexity")
    axes.set_title("Perplexity against self-iterations")
    _legend(axes)


def _legend(axes: Axes) -> None:
    # Beside the axes: the curves of seven tasks leave no free space.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _iterations_axis(axes: Axes, steps: Sequence[int]) -> None:
    lengths_axis(axes, steps)
    axes.set_xlabel("maximum self-iterations")


def _budget(scores: Scores) -> int:
    assert scores.self_iterations is not None
    return scores.self_iterations
