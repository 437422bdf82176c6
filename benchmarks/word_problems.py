"""Word problems in GPU-minutes: the accuracy that recipes of the zoo reach, implicit and explicit.

    python benchmarks/word_problems.py [--spec word_problem_a5] [--groups A5 S5] [--seeds 0 1 2]
        [--models implicit-mamba2 mamba2] [--layers 1 2 4] [--learning-rates 1e-3 2e-3] [--minutes 10]
        [path.to.key=value …]

Each combination is a run of the spec, one after the other on one device, ended after ``--minutes`` at the
latest. An explicit model sees the same phases of data, in so many more steps (``--explicit-steps`` times)
that it takes about as long. Accuracy is that of the last 10 tokens, read at convergence, with residuals and
the share of sequences that converged beside it. ``--start-from FILE`` begins with the weights of a run, a
checkpoint or a safetensors file. ``--then SPEC …`` goes on from each run with other recipes, each a run of
its own with the same changes. ``--precisely TOLERANCE`` tests a second time, in float32 to that tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, write

from implicit_blocks.devices import choose_device
from trainer.data.word_problem import build as build_data
from trainer.evaluation import evaluate
from trainer.experiments.runs import Finished, load_model, train
from trainer.experiments.word_problem_specs import IMPLICIT, varied

KEPT = ("identity_probability", "length", "sequences", "accuracy_last", "accuracy", "iterations",
        "iterations_max", "residual", "residual_max", "non_converged", "token_converged",
        "seconds")  # fmt: skip


def options_of(words: list[str]) -> argparse.Namespace:
    """Read the command line; changes to the runs may stand anywhere in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="word_problem_a5")
    parser.add_argument("--then", nargs="+", default=[], metavar="SPEC", help="go on with these recipes")
    parser.add_argument("--groups", nargs="+", default=["A5"])
    parser.add_argument("--models", nargs="+", default=["implicit-mamba2"])
    parser.add_argument("--layers", type=int, nargs="+", default=[1], help="of explicit models")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[None], help="(the spec's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--explicit-steps", type=float, default=1.0, metavar="TIMES")
    parser.add_argument("--start-from", type=Path, metavar="FILE")
    parser.add_argument("--precisely", type=float, metavar="TOLERANCE", help="test in float32 too")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", default="word_problems", help="name of the file in benchmarks/results")
    # Options that take several values would take a change that follows them, too.
    changes = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in changes])
    options.overrides = changes
    return options


def main() -> None:
    """Train and test every combination; write the figures after each."""
    options = options_of(sys.argv[1:])
    rows: list[dict[str, Any]] = []
    began = time.strftime("%Y%m%d-%H%M%S")
    for group, model, rate, seed in itertools.product(
        options.groups, options.models, options.learning_rates, options.seeds
    ):
        for layers in [1] if model in IMPLICIT else options.layers:
            start = options.start_from
            for recipe in (options.spec, *options.then):
                row, start = measure(
                    options,
                    recipe,
                    start,
                    group=group,
                    model=model,
                    layers=layers,
                    rate=rate,
                    seed=seed,
                    began=began,
                )
                rows.append(row)
                print(" ".join(shown(row)), flush=True)
                arguments = {key: str(v) if isinstance(v, Path) else v for key, v in vars(options).items()}
                write(options.output, {"machine": machine(), "arguments": arguments, "rows": rows})


def measure(
    options: argparse.Namespace,
    recipe: str,
    start: Path | None,
    *,
    group: str,
    model: str,
    layers: int,
    rate: float | None,
    seed: int,
    began: str,
) -> tuple[dict[str, Any], Path]:
    """Train one model by a recipe, from ``start`` if it is given; return what it reached, and its folder."""
    changes = [f"callbacks=[{{kind: stop_when, value: seconds, above: {60 * options.minutes}}}]"]
    if rate is not None:
        changes.append(f"training.optimizer.learning_rate={rate}")
    if start is not None:
        changes.append(f"training.start_from={start}")
    spec = varied(
        recipe,
        model=model,
        layers=layers,
        group=group,
        seed=seed,
        overrides=[*changes, *options.overrides],
    )
    if model not in IMPLICIT and options.explicit_steps != 1.0:
        steps = round(options.explicit_steps * spec.total_steps)
        changes.append(f"training.max_steps={steps}")
        spec = varied(
            recipe,
            model=model,
            layers=layers,
            group=group,
            seed=seed,
            overrides=[*changes, *options.overrides, f"training.max_steps={steps}"],
        )
    name = f"{options.output}-{Path(recipe).stem}-{group}-{model}-{layers}-{rate or 'own'}-seed{seed}"
    finished = train(spec, options.runs / f"{name}-{began}", name=name, device=options.device)
    summary = finished.summary
    tests = [{key: test[key] for key in KEPT} for test in summary["evaluation"]]
    if options.precisely is not None and model in IMPLICIT:
        tests += precise_tests(finished, tolerance=options.precisely, device=options.device)
    row = {
        "recipe": recipe,
        "group": group,
        "model": model,
        "layers": layers,
        "learning_rate": rate or spec.training.optimizer.learning_rate,
        "seed": seed,
        "parameters": summary["parameters"],
        "steps": summary["steps"],
        "of_steps": spec.total_steps,
        "tokens": summary["tokens"],
        "training_minutes": round(sum(row["step_seconds"] for row in finished.metrics) / 60, 2),
        "minutes": round(summary["seconds"] / 60, 2),
        "tests": tests,
    }
    return row, finished.folder


def precise_tests(finished: Finished, *, tolerance: float, device: str) -> list[dict[str, Any]]:
    """Test a run's last weights in float32 on the same sequences, to a tolerance."""
    evaluation, at = finished.spec.evaluation.at(finished.spec.data.length), choose_device(device)
    model = load_model(finished, at)
    spec = model.spec
    stopping = spec.at_evaluation.stopping.model_copy(update={"tolerance": tolerance})
    own = spec.at_evaluation.model_copy(update={"stopping": stopping})
    model.reconfigure(spec.model_copy(update={"at_evaluation": own}))
    data = build_data(finished.spec.data, seed=finished.spec.training.seed)
    with torch.no_grad():
        results = evaluate(
            model,
            data.evaluation_sets(evaluation).values(),
            device=at,
            precision="float32",
            batch_size=evaluation.batch_size,
            last_tokens=evaluation.last_tokens,
            window_length=evaluation.window_length,
        )
    rows = [result.as_row(by_position=False) for result in results]
    return [{**{key: row[key] for key in KEPT}, "float32_to": tolerance} for row in rows]


def shown(row: dict[str, Any]) -> list[str]:
    """Return a line about one model."""
    line = [f"{row['group']} {row['model']} x{row['layers']} lr {row['learning_rate']:g} seed {row['seed']}:"]
    line.append(f"{row['steps']} steps, {row['training_minutes']:.1f} minutes;")
    for test in row["tests"]:
        precise = " in float32" if "float32_to" in test else ""
        found = f"p{test['identity_probability']:g} L{test['length']}{precise} {test['accuracy_last']:.2%}"
        if test["residual"] is not None:
            converged = 1 - test["non_converged"]
            found += f" ({test['iterations']:.0f} it, res {test['residual']:.0e}, {converged:.0%} converged)"
        line.append(found)
    return line


if __name__ == "__main__":
    main()
