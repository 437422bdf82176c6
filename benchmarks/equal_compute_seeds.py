"""Tables of runs with several seeds (`equal_compute_gpu.py`), and their differences.

python benchmarks/equal_compute_seeds.py benchmarks/results/equal_compute_llama.json [--picture FILE]

With ``--picture`` all runs of the files are drawn; those of recipes with several seeds are filled.
The tables of last weights are in docs/equal_compute_last_weights.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.experiments.equal_compute.compare import difference_of_losses, recipe_of
from trainer.experiments.equal_compute.recipes import Recipe

SEEDS_HEAD = (
    "model", "parameters", "learning rate", "weight decay", "share", "PFLOP", "choice",
    "report, one per seed", "report", "8 times the length",
)  # fmt: skip

LENGTH_SCALINGS = ("linear", "llama3")


def seeds_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return recipes with their seeds as a Markdown table, the lowest mean on the text of the choice first.

    Means are those of the losses, exponentiated. The last column is the perplexity at 8 times the training
    length over that of the same text at the training length.
    """
    recipes = sorted(by_recipe(runs).values(), key=lambda rows: mean_perplexity(rows, "choice"))
    lines = [SEEDS_HEAD, ("---",) * len(SEEDS_HEAD), *map(_seeds, recipes)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def lengths_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return perplexities at 8 times the training length over those of the same text at the training length.

    One row per recipe with runs of which long sequences were also measured with scaled rotary frequencies;
    means over its seeds.
    """
    head = ("model", "learning rate", "seeds", "as trained", *LENGTH_SCALINGS)
    lines = [head, ("---",) * len(head)]
    for recipe, rows in by_recipe([run for run in runs if run.get("lengths_scaled")]).items():
        ratios = [length_ratios(rows, scaling) for scaling in (None, *LENGTH_SCALINGS)]
        means = [f"{statistics.fmean(column):.2f}" for column in ratios]
        shape = f"{recipe.side}, {recipe.shape}"
        lines.append((shape, f"{recipe.learning_rate:g}", f"{len(rows)}", *means))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def length_ratios(runs: Sequence[Mapping[str, Any]], scaling: str | None = None) -> list[float]:
    """Return the perplexities at 8 times the training length over those at that length, where measured.

    ``scaling`` is that of the rotary frequencies in the long sequences; None: as trained.
    """
    found = []
    for run in (run for run in runs if run["lengths"]):
        long, cut = run["lengths"]
        scaled = {row["scaling"]: row for row in run.get("lengths_scaled") or ()}
        if scaling is None or scaled:
            found.append((long if scaling is None else scaled[scaling])["perplexity"] / cut["perplexity"])
    return found


def by_recipe(runs: Sequence[Mapping[str, Any]]) -> dict[Recipe, list[Mapping[str, Any]]]:
    """Return the runs that ended well by their recipe, with seed 0 in its place; in the order of seeds."""
    found: dict[Recipe, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["recipe"]["seed"]):
        if run["report"] is not None:
            found.setdefault(recipe_of(run).with_seed(0), []).append(run)
    return found


def mean_perplexity(runs: Sequence[Mapping[str, Any]], on: str = "report") -> float:
    """Return the perplexity of the mean loss of runs."""
    return math.exp(statistics.fmean(math.log(run[on]) for run in runs))


def difference_of_runs(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the difference of short rows of two recipes, as `compare.difference` does of whole results."""
    return difference_of_losses(*([math.log(run["report"]) for run in runs] for runs in (ours, theirs)))


def _seeds(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    first, recipe = runs[0], runs[0]["recipe"]
    ratios = length_ratios(runs)
    return (
        f"{first['side']}, {first['shape']}",
        f"{first['parameters'] / 1e6:.1f} M",
        f"{recipe['learning_rate']:g}",
        f"{recipe['weight_decay']:g}",
        f"{recipe['share']:g}",
        f"{first['flops'] / 1e15:.2f}",
        f"{mean_perplexity(runs, 'choice'):.2f}",
        " ".join(f"{run['report']:.2f}" for run in runs),
        f"{mean_perplexity(runs):.2f}",
        f"{statistics.fmean(ratios):.2f}" if ratios else "",
    )


def pictured(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return runs as `trainer.experiments.equal_compute.plot.draw` reads them; several seeds are filled."""
    filled = [run["name"] for rows in by_recipe(runs).values() if len(rows) > 1 for run in rows]
    return {"runs": list(runs), "comparisons": [{"sides": {"both": {"runs": filled}}}]}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="result files of equal_compute_gpu.py")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw perplexity against the budget")
    options = parser.parse_args()
    runs = [run for path in options.files for run in json.loads(path.read_text())["runs"]]
    print(seeds_table(runs))
    if any(run.get("lengths_scaled") for run in runs):
        print(f"\n{lengths_table(runs)}")
    if options.picture is not None:
        from trainer.experiments.equal_compute.plot import draw
        from trainer.reporting.pictures import write_picture

        write_picture(draw(pictured(runs)), options.picture)


if __name__ == "__main__":
    main()
