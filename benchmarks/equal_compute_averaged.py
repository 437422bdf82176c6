"""Tables of the comparison at equal compute, with averaged weights.

    python benchmarks/equal_compute_averaged.py [--picture FILE] [--others FILE]

Runs with seed 0 chose the recipes; the others are reported. Of the last and the averaged weights each run has
those that are best on the text of the choice. The summary and the table of convergence are in
docs/equal_compute.md, the others in docs/equal_compute_tables.md.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from equal_compute_parts import (
    ABLATED,
    ATTRACTOR,
    BESIDE,
    CHANGES,
    DAMPED,
    EDGES,
    END,
    FILES,
    FOUR_LAYERS,
    GATED,
    GATED_SIZES,
    GATES,
    GROUPS,
    HALF,
    LONG,
    MAIN,
    MAMBA2_STAGES,
    MORE,
    ONE_MODEL,
    OTHER,
    OTHERS,
    PER_PARAMETER,
    RANDOM,
    SEARCH,
    SIZES,
    STAGED,
    STAGES,
    THIRD,
    choosing,
    points_tried,
    read,
    reported,
    runs_of,
    tuned_alike,
)
from equal_compute_scaling import sentences, series
from equal_compute_seeds import by_recipe, difference_of_runs, length_ratios, mean_perplexity

from trainer.experiments.equal_compute.compare import CONVERGED, MARGIN, recipe_of
from trainer.experiments.equal_compute.recipes import Recipe
from trainer.experiments.equal_compute.tables import at_fixed_point

FAMILIES = {"llama": "Llama", "mamba2": "Mamba2"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
HEAD = (
    "model", "width", "parameters", "optimizer", "learning rate", "weight decay", "share", "average", "PFLOP",
    "choice", "report", "mean", "fixed point", "converged", "own residual",
    "8 times the length",
)  # fmt: skip
ALWAYS = ("model", "parameters", "choice", "report")
"""Columns of `recipes_table` that are shown even if all rows have the same value."""
TARGETS = {"a": -0.05, "b": 0.0, "c": 0.01}
"""Largest difference of the perplexity that is the target, by setting (`SETTINGS`)."""
LONGER = {"llama": 1.5, "mamba2": 1.05}
"""Target of the perplexity at 8 times the training length over that at the training length."""
SETTINGS = {
    "a": "equal text, size and FLOPs",
    "b": "equal text and FLOPs",
    "c": "text seen once, equal FLOPs",
}
"""Settings of the summary."""
Runs = Sequence[Mapping[str, Any]]


def model_of(recipe: Recipe) -> str:
    """Return side, shape and normalization of a recipe."""
    shape = recipe.shape
    for change, words in CHANGES.items():
        shape = shape.replace(change, words)
    return f"{recipe.side}, {shape}{', weight norm' if recipe.weight_norm else ''}"


def recipes_table(*parts: Runs) -> str:
    """Return recipes part by part as a Markdown table, the lowest mean on the text of the choice first.

    Columns in which all rows are equal, or empty, are left out. ``fixed point`` is the change of the
    perplexity from the loops of training to a search in 32 iterations, ``converged`` the share of tokens
    within a tolerance of 1e-3 by then with all tokens before them, ``own residual`` that of tokens within
    it themselves, where it was recorded; all as ranges over the seeds.
    """
    rows = [
        _recipe(*one)
        for runs in parts
        for one in sorted(by_recipe(runs).items(), key=lambda one: mean_perplexity(one[1], "choice"))
    ]
    columns = [
        n
        for n, name in enumerate(HEAD)
        if name in ALWAYS or (len({row[n] for row in rows}) > 1 and not (name == "mean" and _same(rows)))
    ]
    return markdown([[cells[n] for n in columns] for cells in (HEAD, *rows)])


def _same(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether every recipe has one seed, whose perplexity is the mean."""
    return all(row[HEAD.index("report")] == row[HEAD.index("mean")] for row in rows)


def best_of_each_model(runs: Runs) -> list[Mapping[str, Any]]:
    """Return, of every model and optimizer, the run with the lowest perplexity on the text of the choice."""
    best: dict[Any, Mapping[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run["choice"] or math.inf):
        recipe = recipe_of(run)
        best.setdefault((model_of(recipe), recipe.width, recipe.optimizer), run)
    return list(best.values())


def average_of(run: Mapping[str, Any]) -> str:
    """Return the factor of the average whose weights a run is measured with; "none": the last weights."""
    averaged = run["weights"].get("averaged")
    if averaged is None or averaged["choice"] > run["weights"]["last"]["choice"]:
        return "none"
    return f"{averaged.get('decay', run['recipe']['average']):g}"


def _recipe(recipe: Recipe, runs: Runs) -> tuple[str, ...]:
    found = [one for one in map(at_fixed_point, runs) if one is not None]
    changes, shares = sorted(change for change, _ in found), sorted(share for _, share in found)
    ratio = length_ratios(runs)
    return (
        model_of(recipe),
        f"{recipe.width}",
        f"{runs[0]['parameters'] / 1e6:.1f} M",
        OPTIMIZERS[recipe.optimizer],
        f"{recipe.learning_rate:g}",
        f"{recipe.weight_decay:g}",
        f"{recipe.share:g}",
        " ".join(dict.fromkeys(map(average_of, runs))),
        f"{runs[0]['flops'] / 1e15:.2f}",
        f"{mean_perplexity(runs, 'choice'):.2f}",
        " ".join(f"{run['report']:.2f}" for run in runs),
        f"{mean_perplexity(runs):.2f}" if len(runs) > 1 else f"{runs[0]['report']:.2f}",
        _range([f"{change:+.1%}" for change in changes]),
        _range([f"{share:.1%}" for share in shares]),
        _range([f"{share:.2%}" for share in own_residual(runs)]),
        f"{statistics.fmean(ratio):.2f}" if ratio else "",
    )


def own_residual(runs: Runs, *, max_iterations: int = 32) -> list[float]:
    """Return the shares of tokens whose own residual is within the tolerance, sorted; none if not recorded.

    Of the solver with which most tokens converge in 32 iterations (`at_fixed_point`).
    """
    shares = []
    for run in runs:
        points = [one for one in run["fixed_point"] or () if one.get("token_within") is not None]
        longest = (one for one in points if one["max_iterations"] == 32)
        best = max(longest, key=lambda one: one["token_converged"], default=None)
        shares += [
            one["token_within"]
            for one in points
            if best is not None and (one["solver"], one["max_iterations"]) == (best["solver"], max_iterations)
        ]
    return sorted(shares)


Rows = tuple[Recipe, list[Mapping[str, Any]]]
"""A recipe, and its runs with reported seeds."""


def several_seeds(*parts: str) -> list[Rows]:
    """Return the recipes of parts that have two reported seeds or more, with their runs in all of them."""
    runs = [run for part in parts for run in reported(read(part))]
    return [one for one in by_recipe(runs).items() if len(one[1]) > 1]


def pairs() -> Iterator[tuple[str, Rows, Rows]]:
    """Yield part, implicit and explicit recipe of what is compared over reported seeds.

    The explicit recipes are the one with the same layers (`twins`) and the one of any depth and width that
    are best on the text of the choice, with all of the FLOPs or with half of them (`HALF`): a model that
    overfits needs fewer passes. Those of other parts with the same text are among them (`BESIDE`). Recipes
    with one seed are left out.
    """
    for part in FILES:
        candidates = [part, *BESIDE.get(part, ())]
        if part in HALF:
            candidates.append(HALF[part])
        explicit = sorted(
            (one for one in several_seeds(*candidates) if one[0].side == "explicit"),
            key=lambda one: mean_perplexity(one[1], "choice"),
        )
        for ours in (one for one in several_seeds(part) if one[0].side == "implicit"):
            rivals = [one for one in explicit if one[0].optimizer == ours[0].optimizer]
            same = [one for one in rivals if twins(ours[0], one[0])]
            for theirs in (*same[:1], *(one for one in rivals[:1] if one not in same)):
                yield part, ours, theirs


def twins(ours: Recipe, theirs: Recipe) -> bool:
    """Return whether two recipes have equally many layers of the same width."""
    return (sum(ours.layers), ours.width) == (sum(theirs.layers), theirs.width)


def single_seeds(part: str, optimizer: str) -> tuple[Rows, Rows] | None:
    """Return what seed 0 prefers of both sides, of the smallest size of a part; None: it has not both.

    Of a part without seed 0, the reported runs.
    """
    runs = [run for run in choosing(read(part)) or read(part) if recipe_of(run).optimizer == optimizer]
    least = min((run["parameters"] for run in runs), default=0)
    sides = [
        min(
            (run for run in runs if run["side"] == side and run["parameters"] <= least * (1 + MARGIN)),
            key=_choice,
            default=None,
        )
        for side in ("implicit", "explicit")
    ]
    if None in sides:
        return None
    ours, theirs = ((recipe_of(run), [run]) for run in sides if run is not None)
    return ours, theirs


def _choice(run: Mapping[str, Any]) -> float:
    return math.inf if run["choice"] is None else float(run["choice"])


def compared() -> Iterator[tuple[str, str, Rows, Rows]]:
    """Yield setting (`SETTINGS`), part, implicit and explicit recipe of the summary.

    Of several implicit recipes the one with the lowest perplexity on the text of the choice; recipes of one
    seed where a part has no others with that optimizer.
    """
    found = list(pairs())
    for part, optimizer in product(FILES, OPTIMIZERS):
        if part in EDGES:
            continue
        own = [one[1:] for one in found if one[0] == part and one[1][0].optimizer == optimizer]
        if own:
            best = min((ours for ours, _ in own), key=lambda one: mean_perplexity(one[1], "choice"))
            own = [pair for pair in own if pair[0] is best or pair[0][0] == best[0]]
        elif (pair := single_seeds(part, optimizer)) is not None:
            own = [pair]
        for ours, theirs in own:
            setting = "c" if "once" in part else "a" if twins(ours[0], theirs[0]) else "b"
            yield setting, part, ours, theirs


def summary_table(parts: Sequence[str]) -> str:
    """Return the summary of parts: one row per part, setting and optimizer."""
    head = ("model", "setting", "optimizer", "implicit", "explicit", "difference", "95 % interval", "seeds",
            "points", "target", "reached")  # fmt: skip
    found = (one for one in compared() if one[1] in parts)
    rows = sorted(found, key=lambda one: (one[2][0].optimizer, one[0]))
    return markdown([head, *(_summary(*row) for row in rows)])


def _name(part: str, *sides: Rows) -> str:
    """Return family and sizes of recipes, penalty and weight norm of the implicit one, text and FLOPs."""
    sizes = dict.fromkeys(f"{rows[0]['parameters'] / 1e6:.1f} M" for _, rows in sides)
    penalty = ", penalty" if sides[0][0].residual_weight and END not in part else ""
    words = (
        *(FOUR_LAYERS, "weight norm", GATES, STAGES, END, DAMPED, ATTRACTOR, RANDOM),
        *(OTHER, THIRD, LONG, MORE),
    )
    added = "".join(f", {name}" for name in words if name in part)
    if part in PER_PARAMETER:
        added += f", {part.rpartition(', ')[2]}"
    return f"{FAMILIES[sides[0][0].family]}, {' beside '.join(sizes)}{penalty}{added}"


def _summary(setting: str, part: str, ours: Rows, theirs: Rows) -> tuple[str, ...]:
    result = difference_of_runs(ours[1], theirs[1])
    mark = " (half the FLOPs)" if theirs[1][0]["flops"] < 0.51 * ours[1][0]["flops"] else ""
    mark += " (no weight norm)" if ours[0].weight_norm and not theirs[0].weight_norm else ""
    interval, target, one_seed = result["interval"], TARGETS[setting], result["seeds"] == [1, 1]
    reached = result["difference"] <= target and (setting != "a" or result["below_with_every_seed"])
    points = [points_tried(part, side[0]) for side in (ours, theirs)]
    cells = (
        _name(part, ours, theirs),
        f"({setting}) {SETTINGS[setting]}",
        OPTIMIZERS[ours[0].optimizer],
        f"{result['implicit']:.2f}",
        f"{result['explicit']:.2f}{mark}",
        f"{result['difference']:+.1%}",
        "" if interval is None else f"{100 * interval[0]:+.1f} to {interval[1]:+.1%}",
        ", ".join(map(str, dict.fromkeys(result["seeds"]))),
        ", ".join(str(len(one)) for one in (points if points[0] != points[1] else points[:1])),
        f"{target:+.0%}" if target else "below",
        f"{'yes' if reached else 'no'}{', one seed' if one_seed else ''}",
    )
    return tuple(minus(cell) for cell in cells)


def convergence_table(parts: Sequence[str]) -> str:
    """Return convergence and longer text of the implicit recipes of the summary in setting (a)."""
    lines: list[tuple[str, ...]] = [
        ("model", "optimizer", "tokens converged", "own residual", "at the fixed point", "8 times the length",
         "scaled", "missed")
    ]  # fmt: skip
    for _, part, (recipe, runs), _ in sorted(
        (one for one in compared() if one[0] == "a" and one[1] in parts),
        key=lambda one: one[2][0].optimizer,
    ):
        found = [one for one in map(at_fixed_point, runs) if one is not None]
        shares, changes = sorted(share for _, share in found), sorted(change for change, _ in found)
        own = own_residual(runs)
        ratio, scaled = length_ratios(runs), length_ratios(runs, "llama3")
        limit = LONGER[recipe.family]
        missed = {
            "convergence": shares[0] < CONVERGED and min(own, default=0) < CONVERGED,
            "convergence with all tokens before": shares[0] < CONVERGED <= min(own, default=0),
            "fixed point": changes[-1] > 0.005,
            "length": max(scaled or ratio, default=0) > limit,
            "length without scaling": max(ratio, default=0) > limit >= max(scaled, default=math.inf),
        }
        cells = (
            _range([f"{one:.1%}" for one in shares]),
            _range([f"{one:.2%}" for one in own]),
            _range([f"{one:+.1%}" for one in changes]),
            *(f"{statistics.fmean(one):.2f}" if one else "" for one in (ratio, scaled)),
            ", ".join(name for name, is_missed in missed.items() if is_missed),
        )
        optimizer = OPTIMIZERS[recipe.optimizer]
        lines.append((_name(part, (recipe, runs)), optimizer, *(minus(cell) for cell in cells)))
    return markdown(lines)


def minus(text: str) -> str:
    """Return text with the sign for minus, and a space before percent signs."""
    return re.sub(r"(?<![\w.])-(?=\d)", "\N{MINUS SIGN}", text).replace("%", " %")


def phrase(ours: Rows, theirs: Rows) -> str:
    """Return the difference of a pair in words."""
    found = difference_of_runs(ours[1], theirs[1])
    low, high = found["interval"]
    side = "below" if found["difference"] < 0 else "above"
    return minus(f"{abs(found['difference']):.1%} {side} (95% interval: {100 * low:+.1f} to {high:+.1%})")


def last_weights(runs: Runs, side: str, *, optimizer: str = "adamw") -> list[float]:
    """Return the perplexities of the last weights on the reported books, of all seeds, in their order."""
    return [
        run["weights"]["last"]["report"]
        for run in sorted(runs, key=lambda run: run["recipe"]["seed"])
        if run["side"] == side and recipe_of(run).optimizer == optimizer
    ]


def averages_table(runs: Runs) -> str:
    """Return what averaged weights change on the reported books, by family, text, side and optimizer."""
    head = ("family", "text seen", "side", "optimizer", "runs", "averaged chosen", "median", "range")
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        if "averaged" in run["weights"]:
            recipe = recipe_of(run)
            often = "once" if run["epochs"] <= 1 else "several times"
            key = (FAMILIES[recipe.family], often, recipe.side, OPTIMIZERS[recipe.optimizer])
            groups.setdefault(key, []).append(run["weights"])
    lines: list[tuple[str, ...]] = [head]
    for group, weights in sorted(groups.items()):
        better = sum(one["averaged"]["choice"] < one["last"]["choice"] for one in weights)
        changes = sorted(one["averaged"]["report"] / one["last"]["report"] - 1 for one in weights)
        ends = _range([f"{change:+.1%}" for change in changes])
        lines.append((*group, f"{len(weights)}", f"{better}", f"{statistics.median(changes):+.1%}", ends))
    return markdown(lines)


def lines(parts: Sequence[str]) -> str:
    """Return what the lines through the sizes of parts say; empty with fewer than two sizes."""
    runs = [
        run
        for part in parts
        for own in (part, *BESIDE.get(part, ()))
        for run in read(own)
        if run["side"] == "explicit" or (own == part and run["recipe"]["end_loops"])
    ]
    found = series(runs, layers=[1, 2, 1], optimizer="adamw")
    return sentences(found) if len(found) > 1 else ""


def search() -> list[list[Mapping[str, Any]]]:
    """Return the runs of the search among recipes with gates by family; three seeds of each recipe.

    Seed 0 of two of them is in other parts.
    """
    runs = runs_of(SEARCH)
    known = by_recipe(runs)
    others = [run for part in (GATED, STAGED, MAMBA2_STAGES) for run in choosing(read(part))]
    every = [*runs, *(run for run in others if recipe_of(run).with_seed(0) in known)]
    return [[run for run in every if run["recipe"]["family"] == family] for family in FAMILIES]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, the first of them the head, as a Markdown table."""
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (lines[0], ("---",) * len(lines[0]), *lines[1:])
    )


def _range(values: Sequence[str]) -> str:
    """Return the first and the last of sorted values."""
    return " to ".join(dict.fromkeys([values[0], values[-1]])) if values else ""


def tables() -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each table of the page that has runs.

    A table of reported seeds has two runs or more.
    """
    for title, parts in GROUPS.items():
        runs = [read(part) for part in parts]
        chose = [best_of_each_model(choosing(own)) for own in runs]
        if any(chose) and title not in ONE_MODEL:
            yield f"{title}: the choice", recipes_table(*chose)
        seeds = [reported(own) for own in runs]
        if sum(map(len, seeds)) > 1:
            yield f"{title}: reported seeds", recipes_table(*seeds)
    yield "summary", summary_table(MAIN)
    yield "summary of other recipes", summary_table(OTHERS)
    yield "convergence", convergence_table(MAIN)
    yield "convergence of other recipes", convergence_table(OTHERS)
    everything = [run for part in FILES if part != ABLATED for run in read(part)]
    if everything:
        yield "averaged weights", averages_table(everything)
    yield "search", recipes_table(*search())
    for title, parts in (("lines", SIZES), ("lines with gates", GATED_SIZES)):
        if statements := lines(parts):
            yield title, statements


def draw(parts: Sequence[str]) -> Any:
    """Return a picture: differences of the summary in settings (a) and (b), with their 95 % intervals.

    Small markers are seeds, each beside the mean of the explicit model. Recipes with one seed are left out.
    Circles are filled where both sides were tuned alike (`tuned_alike`).
    """
    from trainer.reporting.pictures import BLUE, GREY, ORANGE, finish, new_figure

    found = [row for row in compared() if row[0] in "ab" and row[1] in parts and len(row[2][1]) > 1]
    found.sort(key=lambda row: (row[0], row[2][0].optimizer))
    title = "Perplexity of implicit models beside explicit ones, at equal compute"
    figure = new_figure(width=9, height=1.2 + 0.34 * len(found), title=title)
    axes = figure.subplots()
    labels = []
    for place, (setting, part, ours, theirs) in enumerate(found):
        result = difference_of_runs(ours[1], theirs[1])
        color = ORANGE if setting == "a" else BLUE
        axes.plot([100 * end for end in result["interval"]], [place, place], color=color, linewidth=2)
        filled = color if tuned_alike(part, ours[0], theirs[0]) else "white"
        axes.plot(100 * result["difference"], place, "o", color=color, markersize=8, markerfacecolor=filled)
        seeds = [100 * (run["report"] / result["explicit"] - 1) for run in ours[1]]
        axes.plot(seeds, [place + 0.22] * len(seeds), "|", color=GREY, markersize=7)
        labels.append(f"({setting}) {_name(part, ours, theirs)}, {OPTIMIZERS[ours[0].optimizer]}")
    axes.axvline(0, color=GREY, linewidth=1)
    axes.axvline(100 * TARGETS["a"], color=GREY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    finish(axes, title="", x="difference (%)", y="")
    return figure


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the differences of the summary")
    parser.add_argument("--others", type=Path, metavar="FILE", help="draw those of the other recipes")
    options = parser.parse_args()
    for title, text in tables():
        print(f"{title}\n\n{text}\n")
    from trainer.reporting.pictures import write_picture

    for path, parts in ((options.picture, MAIN), (options.others, OTHERS)):
        if path is not None:
            write_picture(draw(parts), path)


if __name__ == "__main__":
    main()
