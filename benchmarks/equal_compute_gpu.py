"""Train a list of runs side by side on one GPU, for at most some seconds: equal compute, resumable.

    python benchmarks/equal_compute_gpu.py RUNS.json --data DIR --report DIR --output DIR --seconds 500

RUNS.json is a list of recipes (`trainer.experiments.equal_compute.recipes.Recipe`), the most important
first, or the name of a list of this file: llama, mamba2, tiny. Finished runs, which have a result file in the
output folder, are skipped. Without a GPU it runs on the CPU, to test the program, not to measure.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ENDING = 20.0
"""Seconds kept for the evaluation of the runs that end last."""

LLAMA: dict[str, Any] = {"family": "llama", "petaflops": 3.0, "learning_rate": 2e-3}
MAMBA2: dict[str, Any] = {"family": "mamba2", "petaflops": 0.75, "learning_rate": 2e-3}
FOUR: dict[str, Any] = {"layers": [0, 4, 0]}
EIGHT: dict[str, Any] = {"layers": [0, 8, 0]}
RESIDUAL: dict[str, Any] = {"layers": [1, 2, 1], "loops": 3}


def plans() -> dict[str, list[dict[str, Any]]]:
    """Return the lists of runs by name, the most informative runs first."""
    equal = [FOUR, RESIDUAL]  # equal parameters; EIGHT has the same FLOPs per token as RESIDUAL
    first = [{**LLAMA, **shape, "weight_decay": 1.5} for shape in (*equal, EIGHT)]
    first += [{**LLAMA, **shape, "weight_decay": decay} for decay in (3.0, 0.75) for shape in equal]
    first += [{**LLAMA, **shape, "weight_decay": 1.5, "share": 0.6} for shape in (FOUR, EIGHT, RESIDUAL)]
    first += [{**LLAMA, **shape, "weight_decay": 1.5, "seed": 1} for shape in (RESIDUAL, FOUR, EIGHT)]
    first += [{**LLAMA, **EIGHT, "weight_decay": decay} for decay in (3.0, 0.75)]
    looped: dict[str, Any] = {"layers": [2, 4, 2], "loops": 2}
    shapes: tuple[dict[str, Any], ...] = (EIGHT, looped, {"layers": [0, 12, 0]})
    mamba2 = [{**MAMBA2, **shape, "weight_decay": 2.0} for shape in shapes]
    mamba2 += [{**MAMBA2, **shape, "weight_decay": decay} for decay in (1.0, 4.0) for shape in shapes]
    mamba2 += [{**MAMBA2, **shape, "weight_decay": 2.0, "share": 0.6} for shape in shapes]
    mamba2 += [{**MAMBA2, **shape, "weight_decay": 2.0, "seed": 1} for shape in shapes]
    tiny = {
        "petaflops": 2e-5, "learning_rate": 4e-3, "width": 64, "batch_size": 4, "length": 64,
        "precision": "float32", "weight_decay": 1.5,
    }  # fmt: skip
    shapes = ({"layers": [0, 2, 0]}, {"layers": [1, 1, 1], "loops": 3})
    return {
        "llama": first,
        "mamba2": mamba2,
        "tiny": [{**tiny, **shape, "family": family} for family in ("llama", "mamba2") for shape in shapes],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a short table of results, the best on the chosen text first."""
    lines = [
        f"{'run':<58} {'M':>5} {'PFLOP':>6} {'epochs':>6} {'choice':>7} {'report':>7} "
        f"{'@16':>7} {'conv32':>6} {'s':>5}"
    ]
    rows = [row for row in rows if row["measured"] is not None]
    for row in sorted(rows, key=lambda row: (row["recipe"]["family"], row["measured"]["choice"]["loss"])):
        measured = row["measured"]
        at16 = next((one["perplexity"] for one in measured.get("loops", []) if one["loops"] == 16), None)
        met = next(
            (
                one["token_converged"]
                for one in measured.get("fixed_point", [])
                if one["max_iterations"] == 32
            ),
            None,
        )
        lines.append(
            f"{row['name'][:58]:<58} {row['parameters'] / 1e6:>5.1f} {row['flops'] / 1e15:>6.2f} "
            f"{row['epochs'] or 0:>6.1f} {measured['choice']['perplexity']:>7.2f} "
            f"{measured['report']['perplexity']:>7.2f} {'' if at16 is None else format(at16, '.2f'):>7} "
            f"{'' if met is None else format(met, '.3f'):>6} {row['seconds']:>5.0f}"
            f"{'' if row['captured'] else '  not captured'}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("runs", type=Path, help="JSON file with a list of recipes, or the name of a plan")
    made.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="tokens with a validation split"
    )
    made.add_argument(
        "--report", type=Path, required=True, metavar="DIR", help="tokens of the reported books"
    )
    made.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the results")
    made.add_argument("--device", default="auto")
    made.add_argument("--seconds", type=float, default=500, help="of the whole command, about (500)")
    made.add_argument(
        "--side-by-side", type=int, default=6, metavar="N", help="models that train at a time (6)"
    )
    made.add_argument("--sequences", type=int, metavar="N", help="of each evaluation set (512)")
    made.add_argument("--eager", action="store_true", help="capture no step as a CUDA graph")
    given = made.parse_args(arguments)

    from trainer.experiments.equal_compute.recipes import Recipe
    from trainer.experiments.equal_compute.runs import read_results, train_recipes

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    known = plans()
    listed = known[str(given.runs)] if str(given.runs) in known else json.loads(given.runs.read_text())
    try:
        missing = train_recipes(
            [Recipe.of(row) for row in listed],
            given.output,
            data=given.data,
            report=given.report,
            device=given.device,
            seconds=given.seconds - ENDING - (time.monotonic() - BEGAN),
            side_by_side=given.side_by_side,
            sequences=given.sequences,
            eager="it was asked for" if given.eager else None,
            log=lambda text: print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True),
        )
    finally:
        rows = read_results(given.output) if given.output.is_dir() else []
        print(table(rows), flush=True)
    print(f"{len(missing)} runs are missing: {', '.join(missing)}" if missing else "all runs are finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
