"""Train a list of runs side by side on one GPU, for at most some seconds: equal compute, resumable.

    python benchmarks/equal_compute_gpu.py RUNS.json --data DIR --report DIR --output DIR --seconds 500

RUNS.json is a list of recipes (`trainer.experiments.equal_compute.recipes.Recipe`), the most important
first, or a result file, such as ``benchmarks/results/equal_compute_llama.json``, whose runs are repeated, or
the name of a list (`lists`). Finished runs, which have a result file in the output folder, are skipped.
Without a GPU it runs on the CPU, to test the program, not to measure.
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

Runs = list[dict[str, Any]]
END: dict[str, Any] = {"end_loops": 8, "end_from": 0.8}
FOUR: dict[str, Any] = {"layers": [0, 4, 0]}
LOOPED: dict[str, Any] = {"layers": [1, 2, 1], "loops": 3, **END}
PENALIZED: dict[str, Any] = {**LOOPED, "residual_weight": 1.0}
EIGHT: dict[str, Any] = {"layers": [0, 8, 0]}
TWELVE: dict[str, Any] = {"layers": [0, 12, 0]}
TWICE: dict[str, Any] = {"layers": [2, 4, 2], "loops": 2}
FEW: dict[str, Any] = {"layers": [3, 2, 3], "loops": 3, **END}
LATE: dict[str, Any] = {**FEW, "loops_from": 0.5}
LATER: dict[str, Any] = {"layers": [2, 4, 2], "loops": 4, "gradient_loops": 2, "loops_from": 0.75, **END}
RANDOM: dict[str, Any] = {
    "layers": [1, 2, 1], "loops": 3, "changes": ["model.depth={kind: uniform, low: 1, high: 5}"],
}  # fmt: skip
LLAMA: dict[str, Any] = {"family": "llama", "petaflops": 1.83, "average": [0.997, 0.998, 0.999, 0.9995]}
MAMBA2: dict[str, Any] = {"family": "mamba2", "petaflops": 0.82, "average": [0.98, 0.99, 0.995, 0.998]}
SHORT: list[float] = [0.99, 0.995, 0.998, 0.999]
LONG: list[float] = [0.998, 0.999, 0.9995]
LONGEST: list[float] = [0.997, *LONG, 0.9998]
LAST: list[float] = [*LONGEST[1:], 0.9999]
TINY: dict[str, Any] = {
    "petaflops": 2e-5, "learning_rate": 4e-3, "weight_decay": 1.5, "width": 64, "batch_size": 4, "length": 64,
    "precision": "float32",
}  # fmt: skip


def lists() -> dict[str, Runs]:
    """Return lists by name: runs of docs/equal_compute_tables.md, and ``tiny``, for testing.

    Those of one seed choose recipes, for `--chosen`. Texts of Llama have half a token per parameter: 0.37 M
    tokens for ``0.7m``, 0.95 M for ``2m``, 5.12 M for ``10m``, 14.1 M for ``30m`` (120 books of
    `equal_compute_text`) and 2.6 M for the others; those of Mamba2 have a quarter, 1.46 M. Lists of Mamba2
    with a width of 352, ``weight_norm``, ``longest``, ``random_depth`` and those of the injection
    ``attractor`` have the text of ``longer_other_text``, 2.53 M. FLOPs are in proportion to text and
    parameters, but twice that in the lists ``longer``, ``attractor``, ``random_depth`` and with weight norm,
    and four times in ``longest`` and ``attractor_longest``; explicit models of Mamba2 with a width of 352
    have half as many, too. Small models have smaller batches, so that they take as many steps.
    ``mamba2_edges`` has four times the FLOPs, and longer averages.
    """
    pair = (FOUR, LOOPED)
    muon = {**LLAMA, "optimizer": "muon"}
    tiny: Runs = [{"layers": [0, 2, 0]}, {"layers": [1, 1, 1], "loops": 3}]
    small = {**LLAMA, "petaflops": 0.235, "width": 128, "batch_size": 8, "average": SHORT}
    smaller = {**small, "petaflops": 0.036, "width": 64, "batch_size": 4}
    tuned = {"learning_rate": 2e-3, "weight_decay": 1.5}
    wide = {**LLAMA, "petaflops": 6.5, "width": 384}
    penalized = (FOUR, PENALIZED)
    attractor = {**LLAMA, **tuned, **LOOPED, "injection": "attractor"}
    wider = {**MAMBA2, "width": 352, "average": SHORT}
    both, normed = ({**EIGHT, "petaflops": 2.4}, {**LATE, "petaflops": 4.8}), {**wider, "weight_norm": True}

    def grid(common: dict[str, Any], shapes: Sequence[dict[str, Any]], *points: tuple[float, float]) -> Runs:
        values = [{"learning_rate": rate, "weight_decay": decay} for rate, decay in points]
        return [{**common, **shape, **point} for point in values for shape in shapes]

    return {
        "mamba2": [
            *grid(MAMBA2, (EIGHT, LATE, LATER, {**TWICE, "loops_from": 0.5}), (4e-3, 2.0)),
            *grid(MAMBA2, (EIGHT, FEW), (2e-3, 2.0), (2e-3, 4.0), (2e-3, 8.0), (4e-3, 1.0), (4e-3, 4.0)),
            *grid(MAMBA2, (TWICE,), (2e-3, 2.0), (2e-3, 4.0), (2e-3, 8.0), (4e-3, 2.0), (4e-3, 4.0)),
            *grid(MAMBA2, (FEW,), (4e-3, 2.0)),
            *grid(MAMBA2, (EIGHT, LATE), (8e-3, 2.0)),
        ],
        "mamba2_10m_longer": [
            {**wider, "learning_rate": 4e-3, "seed": seed, **run}
            for run in (
                {**LATE, "petaflops": 4.8, "weight_decay": 2.0},
                {**EIGHT, "petaflops": 4.8, "weight_decay": 4.0},
                {**EIGHT, "petaflops": 2.4, "weight_decay": 2.0},
                {**TWELVE, "petaflops": 2.4, "weight_decay": 2.0},
            )
            for seed in (1, 2, 3)
        ],
        "mamba2_longer": grid({**MAMBA2, "petaflops": 1.64}, (EIGHT, LATE), (4e-3, 2.0), (4e-3, 4.0)),
        "mamba2_longer_seeds": [
            {**MAMBA2, "petaflops": 1.64, "average": SHORT, "learning_rate": 4e-3, "seed": seed, **shape}
            for seed in (1, 2, 3)
            for shape in ({**EIGHT, "weight_decay": 4.0}, {**LATE, "weight_decay": 2.0})
        ],
        "mamba2_edges": [
            *grid({**MAMBA2, "petaflops": 3.28, "average": SHORT}, (LATE, EIGHT), (4e-3, 4.0), (4e-3, 2.0)),
            *(
                {**MAMBA2, **EIGHT, "average": LONG, "learning_rate": 4e-3, "weight_decay": 2.0, "seed": seed}
                for seed in (1, 2, 3)
            ),
        ],
        "0.7m": grid(smaller, pair, (4e-3, 1.5), (2e-3, 1.5), (4e-3, 0.75), (8e-3, 0.75), (8e-3, 1.5)),
        "2m": grid(small, pair, (2e-3, 1.5), (4e-3, 1.5), (4e-3, 0.75), (2e-3, 0.75)),
        "muon": [
            *grid(muon, pair, (2e-3, 1.5), (2e-3, 3.0), (1e-3, 3.0), (1e-3, 1.5)),
            *grid(muon, pair, (4e-3, 1.5), (4e-3, 3.0), (8e-3, 1.5)),
            *grid(muon, (FOUR,), (2e-3, 0.75)),
        ],
        "muon_seeds": [
            run for seed in (1, 2, 3) for run in grid({**muon, "seed": seed}, pair, (4e-3, 1.5), (2e-3, 1.5))
        ],
        "muon_longer": [
            {**muon, **tuned, **shape, "petaflops": 3.66, "seed": seed}
            for seed in (1, 2, 3)
            for shape in pair
        ],
        "mamba2_muon": grid(
            {**MAMBA2, "average": SHORT, "optimizer": "muon"},
            (EIGHT, LATE),
            *((rate, 2.0) for rate in (1e-3, 2e-3, 4e-3, 8e-3)),
        ),
        "weight_norm": [
            {**LLAMA, "weight_norm": True, "petaflops": 3.66, "average": LONGEST, "weight_decay": 1.5, **run}
            for run in (
                *({**shape, "learning_rate": rate} for rate in (2e-3, 4e-3) for shape in penalized),
                *({**FOUR, "learning_rate": 4e-3, "seed": seed} for seed in (1, 2, 3)),
                *({**PENALIZED, "learning_rate": 2e-3, "seed": seed} for seed in (1, 2, 3)),
            )
        ],
        "penalty": [
            {**LLAMA, **shape, **tuned, "seed": seed} for seed in (1, 2, 3, 4, 5) for shape in penalized
        ],
        "longer": grid({**LLAMA, "petaflops": 3.66}, penalized, (2e-3, 1.5), (2e-3, 3.0), (1e-3, 3.0)),
        "longer_other_text": [
            {**LLAMA, **tuned, "petaflops": 3.66, "average": LONGEST, **shape, "seed": seed}
            for shape, seeds in (
                (FOUR, range(6)),
                (EIGHT, (1, 2, 3)),
                (PENALIZED, range(6)),
                ({**PENALIZED, "residual_weight": 4.0}, range(6)),
                ({**PENALIZED, "residual_weight": 16.0}, (0,)),
            )
            for seed in seeds
        ],
        "longest": [
            {**LLAMA, **tuned, "petaflops": 7.32, "average": LAST, **shape, "seed": seed}
            for shape in (FOUR, {**PENALIZED, "residual_weight": 4.0})
            for seed in (1, 2, 3)
        ],
        "attractor": [
            {**attractor, "petaflops": 3.66, "average": LONGEST, "seed": seed} for seed in range(4)
        ],
        "attractor_longest": [
            {**attractor, "petaflops": 7.32, "average": LAST, "seed": seed} for seed in (1, 2, 3)
        ],
        "random_depth": [
            {**LLAMA, **tuned, **RANDOM, "petaflops": 3.66, "average": LONGEST, "seed": seed}
            for seed in range(4)
        ],
        "mamba2_weight_norm": [
            *grid(normed, both, (4e-3, 2.0), (8e-3, 2.0)),
            *grid(wider, both, (8e-3, 2.0), (2e-3, 4.0)),
            *grid({**wider, "petaflops": 4.8}, (FEW, {**LATE, **TWICE, "loops": 3}), (4e-3, 2.0)),
            *grid({**normed, "petaflops": 4.8}, ({**LATE, "injection": "attractor"},), (4e-3, 2.0)),
            *(run for seed in (1, 2, 3) for run in grid({**normed, "seed": seed}, both, (4e-3, 2.0))),
        ],
        "10m": [{**wide, **tuned, **shape, "seed": seed} for seed in (1, 2, 3) for shape in pair],
        "10m_longer": [
            {**wide, **tuned, **shape, "petaflops": 13.0, "seed": seed}
            for seed in (1, 2, 3)
            for shape in penalized
        ],
        "30m": [
            {**LLAMA, **tuned, "width": 704, "petaflops": 53.0, "average": LONGEST, "seed": 1, **shape}
            for shape in pair
        ],
        "tiny": [{**TINY, **shape, "family": family} for family in ("llama", "mamba2") for shape in tiny],
    }


def listed_runs(name: str) -> Runs:
    """Return the recipes of a list, or of a JSON file with a list or results of this program.

    ``ablations`` and ``ablations_eager`` are lists of `equal_compute_ablations`, and ``ablations/`` with the
    change of a row of its table, such as ``ablations/convergence: damping 0.8``, is that row.

    Raises:
        ValueError: the table has no such row.

    """
    if name.partition("/")[0] in ("ablations", "ablations_eager"):
        from equal_compute_ablations import row_runs, runs

        return row_runs(name.partition("/")[2]) if "/" in name else runs(eager=name == "ablations_eager")
    known = lists()
    if name in known:
        return known[name]
    found = json.loads(Path(name).read_text(encoding="utf-8"))
    return found if isinstance(found, list) else [row["recipe"] for row in found["runs"]]


def chosen_seeds(
    rows: Sequence[dict[str, Any]], seeds: Sequence[int], *, each_optimizer: bool = False
) -> list[dict[str, Any]]:
    """Return further seeds of the best recipe of each family, side, number of layers and width.

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
        size = (recipe["family"], sum(recipe["layers"]), recipe.get("width"))
        kind = (row["side"], *size, bool(recipe.get("residual_weight")))
        for key in (kind, (*kind, recipe.get("optimizer"))) if each_optimizer else (kind,):
            if key not in best or rank(row) < rank(best[key]):
                best[key] = row
    sizes = {key[1:4] for key in best if key[0] == "implicit"}
    least: dict[str, dict[str, Any]] = {}
    for key, row in best.items():
        if key[0] == "explicit" and (key[1] not in least or rank(row) < rank(least[key[1]])):
            least[key[1]] = row
    best = {key: row for key, row in best.items() if key[1:4] in sizes or row is least.get(key[1])}
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
    parser.add_argument("runs", help="JSON file with recipes or results, or the name of a list")
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
        "--brief",
        nargs="?",
        const="listed",
        choices=("listed", "all"),
        help="measure the listed runs, or all of them, only as the choice requires",
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers for training")
    parser.add_argument("--eager", action="store_true", help="capture no step as a CUDA graph")
    options = parser.parse_args(arguments)

    from report import machine

    from trainer.experiments.equal_compute.recipes import Recipe
    from trainer.experiments.equal_compute.runs import read_results, train_recipes
    from trainer.storage.files import write_json

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    try:
        listed = listed_runs(options.runs)
    except (ValueError, OSError) as error:
        parser.error(f"{options.runs}: {error}")

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
                listed, until=min(options.then or math.inf, options.seconds), brief=options.brief is not None
            )
        if options.chosen is not None:
            kept = {row["name"]: row for row in read_results(options.output)}
            tuned = [kept[name] for name in (Recipe.of(row).name for row in listed) if name in kept]
            further = chosen_seeds(tuned, options.chosen, each_optimizer=options.each_optimizer)
            brief = options.brief == "all" or (options.brief is not None and options.then is None)
            missing += train(further, until=options.seconds, brief=brief)
    finally:
        rows = read_results(options.output) if options.output.is_dir() else []
        print(table(rows), flush=True)
        if options.summary is not None and rows:
            write_json(options.summary, {"machine": machine(), **summary(rows)})
    print(f"{len(missing)} runs are missing: {', '.join(missing)}" if missing else "all runs are finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
