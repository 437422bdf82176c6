"""Choices and differences: what may be compared, the recipe that is chosen, and intervals of confidence.

Recipes are chosen on text held out from training; differences are those on books that decided nothing, over
seeds that chose nothing. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.experiments.equal_compute.grid import Grid
from trainer.experiments.equal_compute.recipes import Recipe

MARGIN = 0.03
"""Largest relative difference of FLOPs, and of parameters where they are to be equal."""
CONVERGED = 0.99
"""Share of tokens that must reach the tolerance within the iterations of evaluation."""

Row = Mapping[str, Any]
"""The result of a run (`trainer.experiments.equal_compute.runs`)."""

_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""


def recipe_of(row: Row) -> Recipe:
    """Return the recipe of a result."""
    return Recipe.of(dict(row["recipe"]))


def require_comparable(rows: Sequence[Row], *, equal_parameters: bool = False, once: bool = False) -> None:
    """Reject runs that do not allow a comparison.

    FLOPs are those of the whole budget: a run that uses a share of it, fewer epochs, is compared by what the
    whole would cost.

    Args:
        rows: the results of all sides.
        equal_parameters: whether all models must have equally many parameters.
        once: whether no token may be seen twice.

    Raises:
        ValueError: the runs saw different text or evaluation windows, executed different FLOPs, or break one
            of these conditions; names two of them.

    """
    require_same_text(rows)
    _require_equal(rows, "FLOPs", [_budget(row) for row in rows])
    if equal_parameters:
        _require_equal(rows, "parameters", [row["parameters"] for row in rows])
    for row in rows:
        if once and row["epochs"] is not None and row["epochs"] > 1:
            raise ValueError(
                f"{row['name']} saw its text {row['epochs']:.2f} times, where each token is to be seen once; "
                "lower the budget, or give more text"
            )


def require_same_text(rows: Sequence[Row]) -> None:
    """Reject runs with different training text or evaluation windows.

    Raises:
        ValueError: there is no run, or two of them differ; names both.

    """
    if not rows:
        raise ValueError("there is nothing to compare: no run is finished")
    first = rows[0]
    for row in rows[1:]:
        both = f"{first['name']} and {row['name']}"
        if row["text"] != first["text"]:
            raise ValueError(f"{both} were trained on different text; train both sides on the same tokens")
        if row["windows"] != first["windows"]:
            raise ValueError(
                f"{both} were evaluated on different windows; evaluate both on the same sequences"
            )


def _budget(row: Row) -> float:
    """Return the FLOPs of the complete budget, of which the run executes a share."""
    budget: float = row["flops"] * row["planned_steps"] / max(1, row["steps"]) / row["recipe"]["share"]
    return budget


def _require_equal(rows: Sequence[Row], what: str, values: Sequence[float]) -> None:
    least, most = min(values), max(values)
    if most > least * (1 + MARGIN):
        few, many = rows[values.index(least)]["name"], rows[values.index(most)]["name"]
        raise ValueError(
            f"{many} has {most / least - 1:.1%} more {what} than {few}, and the margin is {MARGIN:.0%}; "
            "change the budget or the shape of one of them"
        )


def loss(row: Row, on: str) -> float:
    """Return the loss of a run on a set, in nats; infinite if the run ended early.

    Of the last and the averaged weights those are read that are better on the text of the choice.
    """
    best = better_weights(row)
    return math.inf if best is None else float(best[on]["loss"])


def better_weights(row: Row) -> Mapping[str, Any] | None:
    """Return the measurements of the last or the averaged weights, as chosen on held-out training text."""
    found = [row[kind] for kind in ("measured", "averaged") if row.get(kind) is not None]
    usable = [one for one in found if one["choice"]["loss"] is not None]
    return min(usable, key=lambda one: one["choice"]["loss"]) if usable else None


def choose(rows: Iterable[Row]) -> Recipe:
    """Return the recipe with the lowest mean loss on the text of the choice, over the seeds that were run.

    Only recipes with all seeds of the others take part.

    Raises:
        ValueError: no run is finished.

    """
    by_recipe: dict[Recipe, dict[int, float]] = {}
    for row in rows:
        recipe = recipe_of(row)
        by_recipe.setdefault(recipe.with_seed(0), {})[recipe.seed] = loss(row, "choice")
    if not by_recipe:
        raise ValueError("there is nothing to choose from: no run is finished")
    seeds = max(map(len, by_recipe.values()))
    complete = {recipe: losses for recipe, losses in by_recipe.items() if len(losses) == seeds}
    return min(complete, key=lambda recipe: statistics.fmean(complete[recipe].values()))


def marks(row: Row, grid: Grid | None = None) -> list[str]:
    """Return the problems of a run as text for a table; empty if there are none.

    ``grid`` is the one that both sides were tuned over; None where that is not to be judged.
    """
    found = []
    if row["ended_early"]:
        found.append(f"ended early ({row['ended_early']})")
    elif row["steps"] < row["planned_steps"]:
        found.append(f"ended early (step {row['steps']} of {row['planned_steps']})")
    if row["skipped_steps"]:
        found.append(f"{row['skipped_steps']} steps skipped")
    if row["recipe"].get("bounded"):
        found.append("executed at most these FLOPs: searches count with their maximum of iterations")
    if grid is not None:
        recipe = recipe_of(row)
        for word, value, values in (
            ("learning rate", recipe.learning_rate, grid.learning_rates),
            ("weight decay", recipe.weight_decay, grid.weight_decays),
            ("share of the budget", recipe.share, grid.shares),
        ):
            if value not in values:
                found.append(f"{word} {value:g} is not on the grid")
    if (share := converged_share(row)) is not None and share < CONVERGED:
        found.append(f"did not converge ({share:.1%} of the tokens)")
    return found


def converged_share(row: Row) -> float | None:
    """Return the share of tokens within the tolerance in the largest number of iterations; None: no loops."""
    best = better_weights(row)
    points = [] if best is None else best.get("fixed_point", [])
    if not points:
        return None
    most = max(one["max_iterations"] for one in points)
    shares = [one["token_converged"] for one in points if one["max_iterations"] == most]
    return max((share for share in shares if share is not None), default=None)


def quantile95(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t, that of 30 degrees of freedom for more of them."""
    return _T95[max(1, min(30, math.floor(degrees))) - 1]


def interval(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the difference of two means and its 95 % interval (Welch's t); None for fewer than 2 values."""
    if min(len(values), len(others)) < 2:
        return None
    spread = [statistics.variance(one) / len(one) for one in (values, others)]
    difference = statistics.fmean(values) - statistics.fmean(others)
    total = sum(spread)
    if total == 0:
        return difference, difference, difference
    degrees = total**2 / sum(
        part**2 / (len(one) - 1) for part, one in zip(spread, (values, others), strict=True)
    )
    half = quantile95(degrees) * math.sqrt(total)
    return difference, difference - half, difference + half


def difference(implicit: Sequence[Row], explicit: Sequence[Row]) -> dict[str, Any]:
    """Return the relative difference of the perplexities on the reported books, implicit over explicit.

    Perplexities are means over seeds of the losses, exponentiated; the interval is that of the difference of
    losses. Negative: the implicit side is better.
    """
    ours, theirs = ([loss(row, "report") for row in rows] for rows in (implicit, explicit))
    return difference_of_losses(ours, theirs)


def difference_of_losses(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the relative difference of perplexities from the losses of the seeds of both sides."""
    found = interval(ours, theirs)
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    return {
        "implicit": math.exp(statistics.fmean(ours)),
        "explicit": math.exp(statistics.fmean(theirs)),
        "seeds": [len(ours), len(theirs)],
        "difference": math.expm1(mean),
        "interval": None if found is None else [math.expm1(found[1]), math.expm1(found[2])],
        "below_with_every_seed": max(ours) < min(theirs),
    }
