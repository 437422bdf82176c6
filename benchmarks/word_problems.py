"""Word problems in GPU-minutes: accuracy of recipes of the zoo, for implicit and explicit models.

    python benchmarks/word_problems.py [--spec word_problem_a5] [--groups A5 S5] [--seeds 0 1 2]
        [--models implicit-mamba2 mamba2] [--layers 1 2 4] [--learning-rates 1e-3 2e-3] [--minutes 10]
        [path.to.key=value …]

Each combination is a run of the spec, one after the other on one device, limited to ``--minutes``. An
explicit model is trained on the same phases of data, for a multiple of the steps (``--explicit-steps``), so
that it takes about as long. Accuracy is that of the last 10 tokens, at convergence, with residuals and the
share of converged sequences. ``--init-from FILE`` starts with the weights of a run, a checkpoint or a
safetensors file. ``--then SPEC …`` continues each run with further recipes, each a separate run with the same
overrides. ``--precisely TOLERANCE`` tests again in float32 with that tolerance.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from report import machine, write

from implicit_blocks._utils.devices import choose_device
from trainer.cli.exit_codes import refuse
from trainer.data.word_problem import build as build_data
from trainer.evaluation.evaluate import evaluate
from trainer.experiments.common.checks import require_once
from trainer.experiments.common.runs import Finished, load_model, train
from trainer.experiments.word_problem.specs import IMPLICIT, vary_spec
from trainer.specs.run import RunSpec, WordProblemSpec

KEPT = ("identity_probability", "length", "sequences", "accuracy_last", "accuracy", "iterations",
        "iterations_max", "residual", "residual_max", "non_converged", "token_converged",
        "seconds")  # fmt: skip


def options_of(words: list[str]) -> argparse.Namespace:
    """Parse the command line; overrides may be at any position."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="word_problem_a5")
    parser.add_argument("--then", nargs="+", default=[], metavar="SPEC", help="continue with these recipes")
    parser.add_argument("--groups", nargs="+", default=["A5"])
    parser.add_argument("--models", nargs="+", default=["implicit-mamba2"])
    parser.add_argument("--layers", type=int, nargs="+", default=[1], help="layers of explicit models")
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", default=[None], help="(default: the spec's)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--explicit-steps", type=float, default=1.0, metavar="TIMES")
    parser.add_argument("--init-from", type=Path, metavar="FILE")
    parser.add_argument(
        "--precisely", type=float, metavar="TOLERANCE", help="also test in float32 with this tolerance"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="output folder of the runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", default="word_problems", help="name of the file in benchmarks/results")
    # Options with several values would also consume overrides that follow them.
    changes = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in changes])
    for name in ("minutes", "explicit_steps", "precisely"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value:g}")
    if min(options.layers) < 1:
        parser.error(f"--layers must be at least 1, got {min(options.layers)}")
    options.overrides = changes
    return options


class Asked(NamedTuple):
    """One of the compared models."""

    group: str
    model: str
    layers: int
    rate: float | None
    seed: int


def main() -> int:
    """Train and test every combination; write the figures after each; return the exit status."""
    options = options_of(sys.argv[1:])
    try:
        carry_out(options)
    except ValueError as error:
        return refuse(str(error))
    return 0


def carry_out(options: argparse.Namespace) -> None:
    """Validate all options first, since later recipes start after minutes, then run them."""
    for name in ("groups", "models", "layers", "learning_rates", "seeds"):
        require_once(f"--{name.replace('_', '-')}", getattr(options, name))
    require_once("--spec with --then", (options.spec, *options.then))
    plan = [
        Asked(group, model, layers, rate, seed)
        for group, model, rate, seed in itertools.product(
            options.groups, options.models, options.learning_rates, options.seeds
        )
        for layers in ([1] if model in IMPLICIT else options.layers)
    ]
    for one, recipe in itertools.product(plan, (options.spec, *options.then)):
        run_spec(options, recipe, one, start=options.init_from)
    rows: list[dict[str, Any]] = []
    began = time.strftime("%Y%m%d-%H%M%S")
    for one in plan:
        start = options.init_from
        for recipe in (options.spec, *options.then):
            row, start = measure(options, recipe, one, start=start, began=began)
            rows.append(row)
            print(" ".join(shown(row)), flush=True)
            arguments = {key: str(v) if isinstance(v, Path) else v for key, v in vars(options).items()}
            write(options.output, {"machine": machine(), "arguments": arguments, "rows": rows})


def run_spec(options: argparse.Namespace, recipe: str, one: Asked, *, start: Path | None) -> RunSpec:
    """Return the run spec of one model with one recipe."""
    changes = [f"callbacks=[{{kind: stop_when, value: seconds, above: {60 * options.minutes}}}]"]
    if one.rate is not None:
        changes.append(f"training.optimizer.learning_rate={one.rate}")
    if start is not None:
        changes.append(f"training.init_from={start}")

    def varied(*more: str) -> RunSpec:
        return vary_spec(
            recipe,
            model=one.model,
            layers=one.layers,
            group=one.group,
            seed=one.seed,
            overrides=[*changes, *options.overrides, *more],
        )

    spec = varied()
    if one.model in IMPLICIT or options.explicit_steps == 1.0:
        return spec
    return varied(f"training.max_steps={round(options.explicit_steps * spec.total_steps)}")


def measure(
    options: argparse.Namespace, recipe: str, one: Asked, *, start: Path | None, began: str
) -> tuple[dict[str, Any], Path]:
    """Train one model with a recipe, from ``start`` if given; return its results and folder."""
    spec = run_spec(options, recipe, one, start=start)
    what = f"{one.group}-{one.model.replace(':', '-')}-{one.layers}-{one.rate or 'own'}-seed{one.seed}"
    name = f"{options.output}-{Path(recipe).stem}-{what}"
    finished = train(spec, options.runs / f"{name}-{began}", name=name, device=options.device)
    summary = finished.summary
    tests = [{key: test[key] for key in KEPT} for test in summary["evaluation"]]
    if options.precisely is not None and one.model in IMPLICIT:
        tests += precise_tests(finished, tolerance=options.precisely, device=options.device)
    row = {
        "recipe": recipe,
        "group": one.group,
        "model": one.model,
        "layers": one.layers,
        "learning_rate": one.rate or spec.training.optimizer.learning_rate,
        "seed": one.seed,
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
    """Test a run's final weights in float32 on the same sequences with a tolerance."""
    evaluation, at = finished.spec.evaluation.at(finished.spec.data.seq_len), choose_device(device)
    model: Any = load_model(finished, at)
    spec = model.spec
    stopping = spec.at_evaluation.stopping.model_copy(update={"tolerance": tolerance})
    own = spec.at_evaluation.model_copy(update={"stopping": stopping})
    model.reconfigure(spec.model_copy(update={"at_evaluation": own}))
    data = build_data(cast(WordProblemSpec, finished.spec.data), seed=finished.spec.training.seed)
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
    """Return a line of results for one model."""
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
    sys.exit(main())
