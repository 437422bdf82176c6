"""Perplexity against size at equal compute, with a fitted line for each side: docs/equal_compute_tables.md.

    cd benchmarks && python equal_compute_scaling.py results/equal_compute_averaged{_700k,_2m,,_10m,_30m}.json

Each file has one size, or several; files of one size must have the same text. Compares an implicit shape with
the explicit model of equally many layers at every width that both have, with text and FLOPs in proportion.
Lines are those of the loss in the logarithm of the number of parameters.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equal_compute_lines import Line, line_of_differences, line_of_losses
from equal_compute_seeds import by_recipe, difference_of_runs, mean_perplexity

from trainer.experiments.equal_compute.compare import MARGIN

SIDES = ("explicit", "implicit")
LARGER = (130e6, 1.3e9)
"""Parameters of the zoo's models at which the line of the differences is read."""

Runs = Sequence[Mapping[str, Any]]


def series(
    runs: Runs, *, layers: Sequence[int], optimizer: str | None = None
) -> dict[int, dict[str, list[Mapping[str, Any]]]]:
    """Return the reported runs of both sides by parameters of the explicit one, at widths that both have.

    Of several recipes of a side and size that have the lowest perplexity on the text of the choice.

    Args:
        runs: short rows; seed 0 chose the recipes and is left out.
        layers: of prelude, core and coda of the implicit side.
        optimizer: of both sides; None: the better one of each.

    Raises:
        ValueError: the budgets of both sides differ by more than 3 %.

    """
    found: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for recipe, rows in by_recipe([run for run in runs if run["recipe"]["seed"]]).items():
        wanted = tuple(layers) if recipe.side == "implicit" else (0, sum(layers), 0)
        if recipe.layers != wanted or optimizer not in (None, recipe.optimizer):
            continue
        sides = found.setdefault(recipe.width, {})
        known = sides.get(recipe.side)
        if known is None or mean_perplexity(rows, "choice") < mean_perplexity(known, "choice"):
            sides[recipe.side] = rows
    both = {
        sides["explicit"][0]["parameters"]: sides for _, sides in sorted(found.items()) if len(sides) == 2
    }
    for size, sides in both.items():
        budgets = [sides[side][0]["flops"] / sides[side][0]["recipe"]["share"] for side in SIDES]
        if max(budgets) > min(budgets) * (1 + MARGIN):
            texts = " and ".join(f"{budget / 1e15:.3g} PFLOP" for budget in budgets)
            raise ValueError(f"models of {size / 1e6:.1f} M parameters have budgets of {texts}")
    return both


def losses(found: Mapping[int, Mapping[str, Runs]], side: str) -> dict[int, dict[int, float]]:
    """Return the losses of a side by size and seed."""
    return {
        size: {run["recipe"]["seed"]: math.log(run["report"]) for run in sides[side]}
        for size, sides in found.items()
    }


def fitted(found: Mapping[int, Mapping[str, Runs]]) -> dict[str, Line]:
    """Return the lines of both sides and of their difference."""
    ours, theirs = (losses(found, side) for side in ("implicit", "explicit"))
    return {
        "explicit": line_of_losses(theirs),
        "implicit": line_of_losses(ours),
        "difference": line_of_differences(ours, theirs),
    }


def table(found: Mapping[int, Mapping[str, Runs]]) -> str:
    """Return the sizes as a Markdown table."""
    head = ("parameters", "width", "PFLOP", "explicit", "implicit", "difference", "95 % interval")
    lines = [head, ("---",) * len(head)]
    for size, sides in found.items():
        result = difference_of_runs(sides["implicit"], sides["explicit"])
        interval = result["interval"]
        first = sides["implicit"][0]
        lines.append((
            f"{size / 1e6:.1f} M",
            f"{first['recipe']['width']}",
            f"{first['flops'] / 1e15:.2f}",
            *(f"{mean_perplexity(sides[side]):.2f} ({len(sides[side])})" for side in SIDES),
            f"{result['difference']:+.1%}",
            "" if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
        ))  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def sentences(found: Mapping[int, Mapping[str, Runs]]) -> str:
    """Return the slopes of the lines, and the difference they give for larger models, as a Markdown list.

    With fewer than two sizes: that there is no line.
    """
    if len(found) < 2:
        return (
            f"- {len(found)} size with reported seeds of both sides: no line, and nothing about other sizes"
        )
    lines, sizes = fitted(found), sorted(found)
    statements = []
    for side in SIDES:
        low, high = lines[side].slope_interval
        statements.append(f"- {side}: perplexity ∝ N^{lines[side].slope:.3f} ({low:.3f} to {high:.3f})")
    low, high = (math.expm1(value * math.log(10)) for value in lines["difference"].slope_interval)
    change = math.expm1(lines["difference"].slope * math.log(10))
    statements.append(f"- difference per factor of 10 in size: {change:+.1%} ({low:+.1%} to {high:+.1%})")
    for size in LARGER:
        mean, low, high = (math.expm1(value) for value in lines["difference"].at(math.log(size)))
        text = f"the line gives {mean:+.1%} ({low:+.1%} to {high:+.1%})"
        statements.append(f"- at {size / 1e6:g} M, {size / sizes[-1]:.0f} times the largest size: {text}")
    return "\n".join(statements).replace("-0.", "\N{MINUS SIGN}0.")


def draw(found: Mapping[int, Mapping[str, Runs]]) -> Any:
    """Return the picture: the runs of both sides, and their differences, with the intervals of the lines."""
    from trainer.reporting.pictures import GREY, ORANGE, finish, new_figure, plain_logarithm

    figure = new_figure(width=10, height=3.6, title="Perplexity on held-out books by size, at equal compute")
    perplexity, difference = figure.subplots(1, 2)
    lines, sizes = fitted(found), sorted(found)
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (n / 40) for n in range(41)]

    def band(axes: Any, line: Line, color: str, scale: Callable[[float], float]) -> None:
        middle, low, high = zip(*(map(scale, line.at(math.log(size))) for size in grid), strict=True)
        axes.plot(grid, middle, color=color)
        axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)

    for side, color in (("explicit", GREY), ("implicit", ORANGE)):
        points = [(size, run["report"]) for size, sides in found.items() for run in sides[side]]
        perplexity.plot(*zip(*points, strict=True), "o", color=color, label=side, markersize=4)
        band(perplexity, lines[side], color, math.exp)
    perplexity.legend(frameon=False)
    plain_logarithm(perplexity, "y")
    ours, theirs = (losses(found, side) for side in ("implicit", "explicit"))
    pairs = [
        (size, 100 * math.expm1(loss - theirs[size][seed]))
        for size in sizes
        for seed, loss in ours[size].items()
        if seed in theirs[size]
    ]
    difference.plot(*zip(*pairs, strict=True), "o", color=ORANGE, markersize=4)
    band(difference, lines["difference"], ORANGE, lambda value: 100 * math.expm1(value))
    difference.axhline(0, color=GREY, linewidth=1)
    for axes, title, label in (
        (perplexity, "both sides", "perplexity"),
        (difference, "implicit beside explicit, seed by seed", "difference (%)"),
    ):
        plain_logarithm(axes, "x", at=sizes)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:.1f} M")
        finish(axes, title=title, x="parameters", y=label)
    return figure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="result files of equal_compute_gpu.py")
    parser.add_argument("--layers", type=int, nargs=3, default=[1, 2, 1], help="of the implicit side (1 2 1)")
    parser.add_argument("--optimizer", help="of both sides (the better one of each)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw both sides with their lines")
    options = parser.parse_args()
    runs = [run for path in options.files for run in json.loads(path.read_text())["runs"]]
    found = series(runs, layers=options.layers, optimizer=options.optimizer)
    print(f"{table(found)}\n\n{sentences(found)}")
    if options.picture is not None:
        from trainer.reporting.pictures import write_picture

        write_picture(draw(found), options.picture)


if __name__ == "__main__":
    main()
