"""Tables of the comparison with averaged weights, Muon and late loops: docs/equal_compute.md.

    python benchmarks/equal_compute_averaged.py

Runs with seed 0 chose the recipes; the others are reported. Of the last and the averaged weights each run has
those that are best on the text of the choice.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from equal_compute_scaling import fitted, sentences, series
from equal_compute_scaling import table as sizes_table
from equal_compute_seeds import by_recipe, difference_of_runs, mean_perplexity
from report import RESULTS

from trainer.experiments.equal_compute.compare import MARGIN, recipe_of
from trainer.experiments.equal_compute.recipes import Recipe
from trainer.experiments.equal_compute.tables import at_fixed_point

FILES = {
    "Llama": "equal_compute_averaged",
    "Llama, twice the FLOPs": "equal_compute_averaged_longer",
    "Llama, 2 M": "equal_compute_averaged_2m",
    "Llama, 10 M": "equal_compute_averaged_10m",
    "Llama, Muon": "equal_compute_averaged_muon",
    "5 M": "equal_compute_half",
    "Mamba2": "equal_compute_averaged_mamba2",
    "mamba2": "equal_compute_quarter_mamba2",
    "once": "equal_compute_once_late",
}
"""Result files by part of the comparison."""
FAMILIES = {"llama": "Llama", "mamba2": "Mamba2"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
HEAD = (
    "model", "width", "parameters", "optimizer", "learning rate", "weight decay", "share", "average", "PFLOP",
    "choice", "report, one per seed", "report", "fixed point", "converged", "8 times the length",
)  # fmt: skip
Runs = Sequence[Mapping[str, Any]]


def read(part: str) -> list[dict[str, Any]]:
    """Return the short rows of a part; none if it was not measured."""
    path = RESULTS / f"{FILES[part]}.json"
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return found


def choosing(runs: Runs) -> list[Mapping[str, Any]]:
    """Return the runs that chose."""
    return [run for run in runs if run["recipe"]["seed"] == 0]


def reported(runs: Runs) -> list[Mapping[str, Any]]:
    """Return the runs that are reported."""
    return [run for run in runs if run["recipe"]["seed"]]


def model_of(recipe: Recipe) -> str:
    """Return side, shape and normalization of a recipe."""
    return f"{recipe.side}, {recipe.shape}{', weight norm' if recipe.weight_norm else ''}"


def recipes_table(runs: Runs) -> str:
    """Return recipes as a Markdown table, the lowest mean on the text of the choice first.

    ``fixed point`` is the change of the perplexity from the loops of training to a search in 32 iterations,
    ``converged`` the share of tokens within a tolerance of 1e-3 by then, both as ranges over the seeds.
    """
    recipes = sorted(by_recipe(runs).items(), key=lambda one: mean_perplexity(one[1], "choice"))
    return markdown([HEAD, *(_recipe(recipe, rows) for recipe, rows in recipes)])


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
    long = [run["lengths"] for run in runs if run["lengths"]]
    ratio = [whole["perplexity"] / cut["perplexity"] for whole, cut in long]
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
        f"{mean_perplexity(runs):.2f}",
        _range([f"{change:+.1%}" for change in changes]),
        _range([f"{share:.1%}" for share in shares]),
        f"{statistics.fmean(ratio):.2f}" if ratio else "",
    )


Rows = tuple[Recipe, list[Mapping[str, Any]]]
"""A recipe, and its runs with reported seeds."""


def pairs() -> Iterator[tuple[str, Rows, Rows]]:
    """Yield part, implicit and explicit recipe of what is compared over reported seeds.

    The explicit recipes are the one of equally many parameters and the one of any size that are best on the
    text of the choice. Recipes with one seed are left out.
    """
    for part in FILES:
        known = [one for one in by_recipe(reported(read(part))).items() if len(one[1]) > 1]
        explicit = sorted(
            (one for one in known if one[0].side == "explicit"),
            key=lambda one: mean_perplexity(one[1], "choice"),
        )
        for ours in (one for one in known if one[0].side == "implicit"):
            size = ours[1][0]["parameters"]
            equal = [one for one in explicit if abs(one[1][0]["parameters"] / size - 1) <= MARGIN]
            for theirs in (*equal[:1], *(one for one in explicit[:1] if one not in equal)):
                yield part, ours, theirs


def differences_table() -> str:
    """Return the differences of all pairs."""
    head = ("setting", "implicit", "explicit", "parameters", "perplexities", "seeds", "difference",
            "95 % interval", "every seed below")  # fmt: skip
    return markdown([head, *((part, *_difference(*ours, *theirs)) for part, ours, theirs in pairs())])


def phrase(ours: Rows, theirs: Rows) -> str:
    """Return the difference of a pair in words."""
    found = difference_of_runs(ours[1], theirs[1])
    low, high = found["interval"]
    side = "below" if found["difference"] < 0 else "above"
    text = f"{abs(found['difference']):.1%} {side} (95%: {low:+.1%} to {high:+.1%})"
    text = text.replace("-", "\N{MINUS SIGN}").replace("% to", " to").replace("%", " %")
    return text.replace("95 %:", "95 % interval:")


def _difference(ours: Recipe, our_runs: Runs, theirs: Recipe, their_runs: Runs) -> tuple[str, ...]:
    result = difference_of_runs(our_runs, their_runs)
    interval = result["interval"]
    sizes = [runs[0]["parameters"] / 1e6 for runs in (our_runs, their_runs)]
    width = "" if theirs.width == ours.width else f", width {theirs.width}"
    return (
        f"{ours.shape}, {OPTIMIZERS[ours.optimizer]}",
        f"{theirs.shape}{width}, {OPTIMIZERS[theirs.optimizer]}",
        " and ".join(dict.fromkeys(f"{size:.1f} M" for size in sizes)),
        f"{result['implicit']:.2f} and {result['explicit']:.2f}",
        " and ".join(map(str, result["seeds"])),
        f"{result['difference']:+.1%}",
        "" if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
        "yes" if result["below_with_every_seed"] else "no",
    )


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


def sizes() -> tuple[str, str]:
    """Return the table of sizes and what the lines say; empty with fewer than two sizes."""
    runs = [run for part in ("Llama, 2 M", "Llama", "Llama, 10 M") for run in read(part)]
    runs = [run for run in runs if run["side"] == "explicit" or run["recipe"]["end_loops"]]
    found = series(runs, layers=[1, 2, 1], optimizer="adamw")
    return (sizes_table(found), sentences(fitted(found))) if len(found) > 1 else ("", "")


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, the first of them the head, as a Markdown table."""
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (lines[0], ("---",) * len(lines[0]), *lines[1:])
    )


def _range(values: Sequence[str]) -> str:
    """Return the first and the last of sorted values."""
    return " to ".join(dict.fromkeys([values[0], values[-1]])) if values else ""


def tables() -> Iterator[tuple[str, str]]:
    """Yield the title and the text of every table of the page that was measured."""
    for part in FILES:
        runs = read(part)
        if choosing(runs):
            yield f"{part}: the choice", recipes_table(best_of_each_model(choosing(runs)))
        if reported(runs):
            yield f"{part}: reported seeds", recipes_table(reported(runs))
    yield "differences", differences_table()
    everything = [run for part in FILES for run in read(part)]
    if everything:
        yield "averaged weights", averages_table(everything)
    table, lines = sizes()
    if table:
        yield "sizes", table
        yield "lines", lines


def main() -> None:
    """Print the tables."""
    for title, text in tables():
        print(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
