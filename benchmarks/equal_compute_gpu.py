"""Train a list of runs side by side on one GPU, for at most some seconds: equal compute, resumable.

    python benchmarks/equal_compute_gpu.py RUNS.json --data DIR --report DIR --output DIR --seconds 500

RUNS.json is a list of recipes (`trainer.experiments.equal_compute.recipes.Recipe`), the most important
first, or the name of a list of this file (`plans`), such as llama, mamba2 and tiny. Finished runs, which have
a result file in the output folder, are skipped. Without a GPU it runs on the CPU, to test the program, not to
measure.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ENDING = 20.0
"""Seconds kept for the evaluation of the runs that end last."""

LLAMA: dict[str, Any] = {"family": "llama", "petaflops": 3.0, "learning_rate": 2e-3, "weight_decay": 1.5}
MAMBA2: dict[str, Any] = {"family": "mamba2", "petaflops": 0.75, "learning_rate": 2e-3, "weight_decay": 2.0}
FOUR: dict[str, Any] = {"layers": [0, 4, 0]}
EIGHT: dict[str, Any] = {"layers": [0, 8, 0]}
TWELVE: dict[str, Any] = {"layers": [0, 12, 0]}
RESIDUAL: dict[str, Any] = {"layers": [1, 2, 1], "loops": 3}
TWICE: dict[str, Any] = {"layers": [2, 4, 2], "loops": 2}
LATE: dict[str, Any] = {"layers": [2, 4, 2], "loops": 4, "gradient_loops": 2, "loops_from": 0.75}
END: dict[str, Any] = {"end_loops": 8, "end_from": 0.8}
"""A last part of the steps with more loops, so that more loops in evaluation change nothing."""
GATE: dict[str, Any] = {"gate": 0.5}
HALF: dict[str, Any] = {**LLAMA, "petaflops": 1.83, "average": 0.998}
"""Half a token of text per parameter, and FLOPs for 12 epochs of `RESIDUAL`, with width 256."""
MUON: dict[str, Any] = {"optimizer": "muon"}

Shapes = Sequence[dict[str, Any]]


def plans() -> dict[str, list[dict[str, Any]]]:
    """Return the lists of runs by name, the most informative runs first."""
    tiny = {
        "petaflops": 2e-5, "learning_rate": 4e-3, "width": 64, "batch_size": 4, "length": 64,
        "precision": "float32", "weight_decay": 1.5,
    }  # fmt: skip
    small: Shapes = ({"layers": [0, 2, 0]}, {"layers": [1, 1, 1], "loops": 3})
    return {
        "llama": _llama(),
        "llama_next": _llama_next(),
        "llama_seeds": _llama_seeds(),
        "llama_rates": _llama_rates(),
        "llama_late": _llama_late(),
        "llama_10m": _larger({**LLAMA, "petaflops": 8.0, "width": 384}, (1.5, 0.75)),
        "llama_half": _llama_half(),
        "llama_half_small": _half_small(),
        "fresh_half": _fresh_muon(),
        "mamba2_quarter": _mamba2_quarter(),
        "llama_half_10m": _llama_half_10m(),
        "mamba2": _mamba2(),
        "mamba2_longer": _mamba2_longer(),
        "fresh_llama": _fresh(
            {**LLAMA, "petaflops": 0.26, "weight_decay": 0.3}, (EIGHT, FOUR, RESIDUAL, LATE)
        ),
        "fresh_mamba2": _fresh(
            {**MAMBA2, "petaflops": 0.26, "weight_decay": 0.3, "learning_rate": 4e-3},
            (EIGHT, TWELVE, TWICE, LATE),
        ),
        "fresh_late": _fresh_late(),
        "tiny": [{**tiny, **shape, "family": family} for family in ("llama", "mamba2") for shape in small],
    }


def _llama() -> list[dict[str, Any]]:
    """Equal text, about 4 M tokens: weight decay, share of the budget, and a second seed."""
    equal = (FOUR, RESIDUAL)  # equal parameters; EIGHT has the same FLOPs per token as RESIDUAL
    runs = [{**LLAMA, **shape} for shape in (*equal, EIGHT)]
    runs += [{**LLAMA, **shape, "weight_decay": decay} for decay in (3.0, 0.75) for shape in equal]
    runs += [{**LLAMA, **shape, "share": 0.6} for shape in (FOUR, EIGHT, RESIDUAL)]
    runs += [{**LLAMA, **shape, "seed": 1} for shape in (RESIDUAL, FOUR, EIGHT)]
    return runs + [{**LLAMA, **EIGHT, "weight_decay": decay} for decay in (3.0, 0.75)]


def _llama_next() -> list[dict[str, Any]]:
    """Points beside the best ones of the first list, and what makes searches converge."""
    low = {**LLAMA, "weight_decay": 0.75}
    runs = [{**low, **EIGHT}, {**low, **RESIDUAL, **END}, {**low, **RESIDUAL, **END, **GATE}]
    return [*runs, {**low, **FOUR, "share": 0.6}, {**LLAMA, **FOUR, "share": 0.36}]


def _llama_seeds() -> list[dict[str, Any]]:
    """Further seeds of the sides, each with its recipe; then points that widen the grid at its edges."""
    plain = {**LLAMA, **RESIDUAL, "weight_decay": 0.75}
    sides: Shapes = ({**plain, **END}, {**LLAMA, **FOUR, "share": 0.6}, {**LLAMA, **EIGHT})
    runs = [{**side, "seed": seed} for seed in (1, 2, 3) for side in sides]
    edges: Shapes = (plain, {**LLAMA, **EIGHT, "weight_decay": 0.75}, {**plain, **END, "weight_decay": 0.375})
    runs += [{**edge, "seed": 1} for edge in edges]
    return runs + [{**side, "seed": seed} for seed in (4, 5) for side in sides]


def _llama_rates() -> list[dict[str, Any]]:
    """Learning rates beside the one of the other lists, for each side; late loops, and a gate."""
    looped = {**LLAMA, **RESIDUAL, **END, "weight_decay": 0.75}
    four, eight = {**LLAMA, **FOUR, "share": 0.6}, {**LLAMA, **EIGHT}
    low, high = ([{**side, "learning_rate": rate} for side in (four, looped, eight)] for rate in (1e-3, 4e-3))
    runs = [*low, {**LLAMA, **LATE, **END}, *high]
    runs += [{**four, "learning_rate": 1e-3, "weight_decay": 3.0}, {**looped, **GATE}]
    return [{**run, "seed": 1} for run in runs] + [{**side, "seed": 5} for side in (four, eight)]


def _llama_half() -> list[dict[str, Any]]:
    """Both optimizers, weight decay, width, and a penalty on residuals; a moving average for all."""
    four, eight = {**HALF, **FOUR, "share": 0.6}, {**HALF, **EIGHT}
    looped, late = {**HALF, **RESIDUAL, **END, "weight_decay": 0.75}, {**HALF, **LATE, **END}
    sides: Shapes = (looped, four, late, eight)
    penalty, wide = {"residual_weight": 1.0}, {**HALF, **FOUR, "width": 320}
    runs = [{**side, **optimizer} for optimizer in (MUON, {}) for side in sides]
    runs += [{**looped, **optimizer, **penalty} for optimizer in (MUON, {})]
    high: Shapes = ({**looped, "weight_decay": 1.5}, {**four, "weight_decay": 3.0})
    runs += [{**side, **MUON} for side in high] + [{**wide, **MUON}, wide] + list(high)
    return runs + [{**side, "weight_norm": True, "qk_norm": False} for side in (looped, four)]


def _half_small() -> list[dict[str, Any]]:
    """Width 128, text and FLOPs in proportion: both sides, weight decays, both optimizers."""
    base = {**HALF, "width": 128, "petaflops": 0.23, "average": 0.99}
    looped, four = {**base, **RESIDUAL, **END}, {**base, **FOUR, "share": 0.6}
    points: Shapes = (
        {**looped, "weight_decay": 0.75}, {**four, "weight_decay": 1.5},
        {**looped, "weight_decay": 1.5}, {**four, "weight_decay": 0.75},
    )  # fmt: skip
    return [{**point, **optimizer} for optimizer in (MUON, {}) for point in points]


def _fresh_muon() -> list[dict[str, Any]]:
    """Each token once, with loops in the last steps only: both optimizers, learning rates."""
    base = {**LLAMA, "petaflops": 0.35, "weight_decay": 0.3, "average": 0.99}
    shapes: Shapes = (
        FOUR,
        {"layers": [1, 2, 1], "loops": 2, "loops_from": 0.9},
        {"layers": [1, 2, 1], "loops": 4, "gradient_loops": 2, "loops_from": 0.9},
    )
    return [
        {**base, **shape, **optimizer, "learning_rate": rate}
        for rate, optimizer in ((1e-3, MUON), (1e-3, {}), (2e-3, MUON), (5e-4, {}))
        for shape in shapes
    ]


def _mamba2_quarter() -> list[dict[str, Any]]:
    """Return runs with a quarter of a token of text per parameter, and more FLOPs per token of text."""
    base = {**MAMBA2, "petaflops": 0.82, "average": 0.998}
    late, eight = {**base, **LATE, **END}, {**base, **EIGHT}
    return [late, eight, {**late, **MUON}, {**eight, **MUON}, {**eight, "share": 0.6}]


def _llama_half_10m() -> list[dict[str, Any]]:
    """Width 384, text and FLOPs in proportion to ``llama_half``: reported seeds of recipes of other sizes."""
    base = {**HALF, "width": 384, "petaflops": 6.5, "average": 0.999}
    pair = ({**base, **RESIDUAL, **END, "weight_decay": 0.75}, {**base, **FOUR, "share": 0.6})
    return [
        {**one, **optimizer, "seed": seed} for seed in (1, 2, 3) for optimizer in (MUON, {}) for one in pair
    ]


def _mamba2() -> list[dict[str, Any]]:
    """Equal text, about 2 M tokens: depth, late loops and weight decay, from which each side chooses."""
    shapes: Shapes = (EIGHT, TWELVE, {**LATE, **END}, TWICE)
    return [{**MAMBA2, **shape, "weight_decay": decay} for decay in (2.0, 1.0) for shape in shapes]


def _llama_late() -> list[dict[str, Any]]:
    """Loops switched on late, and a low learning rate: seeds, and what makes searches converge."""
    late = {**LLAMA, **LATE, **END}
    small = {**late, "layers": [1, 2, 1], "loops_from": 0.5}
    slow = {**LLAMA, **RESIDUAL, **END, "weight_decay": 0.75, "learning_rate": 1e-3}
    explicit = {**LLAMA, **FOUR, "share": 0.6, "learning_rate": 1e-3}
    runs = [{**late, "seed": 2}, {**small, "seed": 1}, {**late, "end_loops": 16, "end_from": 0.85, "seed": 1}]
    runs += [{**one, "seed": seed} for seed in (2, 3) for one in (slow, explicit)] + [{**late, "seed": 3}]
    runs += [{**late, "learning_rate": 1e-3, "seed": 1}, {**LLAMA, **FOUR, "share": 0.6, "seed": 5}]
    return runs + [{**late, "seed": seed} for seed in (4, 5)] + [{**LLAMA, **EIGHT, "seed": 5}]


def _mamba2_longer() -> list[dict[str, Any]]:
    """Twice the FLOPs on the same text as ``mamba2``, and wide models of 4 layers of the same size."""
    base = {**MAMBA2, "petaflops": 1.5, "average": 0.998}
    wide, late = {**base, "width": 320}, {**base, **LATE, **END}
    looped = {**wide, **LATE, **END, "layers": [1, 2, 1], "loops_from": 0.5}
    high = {"weight_decay": 3.0}
    runs = [looped, {**wide, **FOUR, "share": 0.5}, {**looped, **high}, {**wide, **FOUR, **high}]
    runs += [{**base, **EIGHT, **high}, {**late, **high}, {**base, **EIGHT, **high, "share": 0.5}]
    runs += [{**wide, **RESIDUAL, **END}]
    return runs


def _larger(base: dict[str, Any], decays: tuple[float, float]) -> list[dict[str, Any]]:
    """Wide models of 4 layers and their looped twins, a few seeds: explicit ones with 60 % of the budget."""
    explicit, implicit = ({**base, "weight_decay": decay} for decay in decays)
    pair = ({**implicit, **RESIDUAL, **END}, {**explicit, **FOUR, "share": 0.6})
    return [{**one, "seed": seed} for seed in (1, 2, 3) for one in pair]


def _fresh_late() -> list[dict[str, Any]]:
    """Each token once, with loops in the last steps only, so that as much text is read as without loops."""
    base = {**LLAMA, "petaflops": 0.26, "weight_decay": 0.3}
    shapes: Shapes = (
        FOUR,
        {"layers": [1, 2, 1], "loops": 2, "loops_from": 0.9},
        {"layers": [1, 2, 1], "loops": 4, "gradient_loops": 2, "loops_from": 0.9},
    )
    return [{**base, **shape, "learning_rate": rate} for rate in (1e-3, 5e-4) for shape in shapes]


def _fresh(base: dict[str, Any], shapes: Shapes) -> list[dict[str, Any]]:
    """Each token once, at most 7.7 M tokens: learning rates, from which each shape chooses."""
    rate = base["learning_rate"]
    return [{**base, **shape, "learning_rate": one} for one in (rate, 2 * rate, rate / 2) for shape in shapes]


def chosen_seeds(
    rows: Sequence[dict[str, Any]], seeds: Sequence[int], *, each_optimizer: bool = False
) -> list[dict[str, Any]]:
    """Return further seeds of the best recipe of each side, number of layers and width.

    Best on the text of the choice; the seeds of the rows are not among the returned ones. Recipes with a
    penalty on residuals are a kind of their own, in which those come first whose tokens converge. Explicit
    models of a size that no implicit one has take part only if they are the best ones.

    Args:
        rows: results with the seeds that choose.
        seeds: the further seeds.
        each_optimizer: whether each optimizer has a choice of its own, too.

    """
    from trainer.experiments.equal_compute.compare import CONVERGED, better_weights, converged_share

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        weights, share = better_weights(row), converged_share(row)
        assert weights is not None
        lost = bool(row["recipe"].get("residual_weight")) and share is not None and share < CONVERGED
        return lost, float(weights["choice"]["loss"])

    best: dict[Any, dict[str, Any]] = {}
    for row in filter(better_weights, rows):
        recipe = row["recipe"]
        kind = (row["side"], sum(recipe["layers"]), recipe.get("width"), bool(recipe.get("residual_weight")))
        for key in (kind, (*kind, recipe.get("optimizer"))) if each_optimizer else (kind,):
            if key not in best or rank(row) < rank(best[key]):
                best[key] = row
    sizes = {key[1:3] for key in best if key[0] == "implicit"}
    explicit = [row for key, row in best.items() if key[0] == "explicit"]
    least = min(explicit, key=rank, default=None)
    best = {key: row for key, row in best.items() if key[1:3] in sizes or row is least}
    taken = {row["recipe"]["seed"] for row in rows}
    left = [seed for seed in seeds if seed not in taken]
    found = [{**row["recipe"], "seed": seed} for seed in left for row in best.values()]
    return [recipe for number, recipe in enumerate(found) if recipe not in found[:number]]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a short table of results, the best on the chosen text first."""
    lines = [
        f"{'run':<58} {'M':>5} {'PFLOP':>6} {'epochs':>6} {'choice':>7} {'report':>7} "
        f"{'@16':>7} {'conv32':>6} {'8x/1x':>6} {'s':>5}"
    ]
    from trainer.experiments.equal_compute.compare import better_weights

    found = [(row, weights) for row in rows if (weights := better_weights(row)) is not None]
    for row, measured in sorted(
        found, key=lambda one: (one[0]["recipe"]["family"], one[1]["choice"]["loss"])
    ):
        at16 = next((one["perplexity"] for one in measured.get("loops", []) if one["loops"] == 16), None)
        points = [one for one in measured.get("fixed_point", []) if one["max_iterations"] == 32]
        best = max(points, key=lambda one: one["token_converged"] or 0.0, default=None)
        converged = None if best is None else best["token_converged"]
        long = [one["perplexity"] for one in measured.get("lengths", [])]
        lines.append(
            f"{row['name'][:58]:<58} {row['parameters'] / 1e6:>5.1f} {row['flops'] / 1e15:>6.2f} "
            f"{row['epochs'] or 0:>6.1f} {measured['choice']['perplexity']:>7.2f} "
            f"{measured['report']['perplexity']:>7.2f} {'' if at16 is None else format(at16, '.2f'):>7} "
            f"{'' if converged is None else format(converged, '.3f'):>6} "
            f"{format(long[0] / long[1], '.3f') if long else '':>6} {row['seconds']:>5.0f}"
            f"{'' if row['captured'] else '  not captured'}"
        )
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the pages need of results; rows of other text or windows are refused."""
    from trainer.experiments.equal_compute.compare import require_same_text
    from trainer.experiments.equal_compute.experiment import short

    require_same_text(rows)
    devices = sorted({row["device"] for row in rows})
    return {"experiment": "equal_compute_gpu", "devices": devices, "runs": [short(row) for row in rows]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="JSON file with a list of recipes, or the name of a plan")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="tokens with a validation split"
    )
    parser.add_argument(
        "--report",
        type=Path,
        required=True,
        metavar="DIR",
        help="tokens of the held-out books for the report",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--seconds", type=float, default=500, help="approximate time limit of the command (500)"
    )
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=6,
        metavar="N",
        help="number of models trained at the same time (6)",
    )
    parser.add_argument("--sequences", type=int, metavar="N", help="sequences per evaluation set (512)")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the results as one JSON file")
    parser.add_argument(
        "--chosen", type=int, nargs="+", metavar="SEED", help="train these seeds of the best finished recipes"
    )
    parser.add_argument(
        "--then",
        type=float,
        metavar="SECONDS",
        help="train the listed runs first, until then, and after that the seeds of --chosen",
    )
    parser.add_argument(
        "--each-optimizer", action="store_true", help="choose for each optimizer separately, too"
    )
    parser.add_argument(
        "--brief", action="store_true", help="measure the listed runs only as the choice requires"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers for training")
    parser.add_argument("--eager", action="store_true", help="capture no step as a CUDA graph")
    options = parser.parse_args(arguments)

    from report import machine

    from trainer.experiments.equal_compute.recipes import Recipe
    from trainer.experiments.equal_compute.runs import read_results, train_recipes
    from trainer.storage.files import write_json

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    known = plans()
    listed = known[str(options.runs)] if str(options.runs) in known else json.loads(options.runs.read_text())

    def train(runs: Sequence[dict[str, Any]], *, until: float, brief: bool) -> list[str]:
        return train_recipes(
            [Recipe.of(row) for row in runs],
            options.output,
            data=options.data,
            report=options.report,
            device=options.device,
            seconds=until - ENDING - (time.monotonic() - BEGAN),
            side_by_side=options.side_by_side,
            sequences=options.sequences,
            brief=brief,
            eager="requested by --eager" if options.eager else None,
            compile_layers=options.compile,
            log=lambda text: print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True),
        )

    missing: list[str] = []
    try:
        if options.chosen is None or options.then is not None:
            missing += train(
                listed, until=min(options.then or math.inf, options.seconds), brief=options.brief
            )
        if options.chosen is not None:
            kept = {row["name"]: row for row in read_results(options.output)}
            tuned = [kept[name] for name in (Recipe.of(row).name for row in listed) if name in kept]
            further = chosen_seeds(tuned, options.chosen, each_optimizer=options.each_optimizer)
            missing += train(further, until=options.seconds, brief=options.brief and options.then is None)
    finally:
        rows = read_results(options.output) if options.output.is_dir() else []
        print(table(rows), flush=True)
        if options.summary is not None and rows:
            write_json(options.summary, {"machine": machine(), **summary(rows)})
    print(f"{len(missing)} runs are missing: {', '.join(missing)}" if missing else "all runs are finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
