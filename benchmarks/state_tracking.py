"""Ten state-tracking tasks with implicit models and five explicit models of their size, tuned alike.

    python benchmarks/state_tracking.py [--tasks parity dyck] [--models implicit-hybrid hybrid mamba2
        attention gated-deltanet rwkv7] [--learning-rates 1e-3 3e-3] [--seeds 0] [--minutes 5]
        [--spec state_tracking] [path.to.key=value …]
    python benchmarks/state_tracking.py --table

All models have the width of the spec, see the same sequences in the same order, and have the same learning
rates to choose from. ``implicit-mamba2`` is the model of the spec. ``implicit-hybrid`` has Mamba2 and RWKV-7
side by side in its layer, ``hybrid`` is its explicit twin. The others, ``implicit-rwkv7`` with the solver of
the spec included, have as many layers as come closest to the parameters of the hybrid.
Every combination is a run in ``--runs``; runs that are finished are read, so that a repeated command
continues, and several processes may share the folder with different tasks. The results contain every run;
the table has the learning rate of each model that is best at the training length, and the lead of the hybrid
over the best explicit model. ``gated-deltanet`` and ``rwkv7`` are plugins, with negative eigenvalues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from pydantic import ValidationError
from report import RESULTS, machine, write

from implicit_blocks.models.counting import count_parameters
from implicit_blocks.specs import merge
from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from implicit_blocks.specs.loading import apply_overrides, resolve
from implicit_blocks.specs.tree import Section
from trainer.cli.exit_codes import refuse
from trainer.experiments.common.checks import require_once
from trainer.experiments.common.runs import train
from trainer.specs.generated import StateTrackingTask
from trainer.specs.run import RunSpec

TASKS = get_args(StateTrackingTask)
IMPLICIT = ("implicit-mamba2", "implicit-rwkv7", "implicit-hybrid")
EXPLICIT = ("hybrid", "mamba2", "attention", "gated-deltanet", "rwkv7")
MODELS = (*IMPLICIT, *EXPLICIT)
SIZE_OF = "implicit-hybrid"
"""The model whose number of parameters the others have, as nearly as whole layers allow."""
KEPT = ("length", "sequences", "loss", "accuracy", "accuracy_last", "sequence_accuracy", "iterations",
        "iterations_max", "residual_max", "non_converged")  # fmt: skip
MOST_LAYERS = 8


def mixer_of(model: str, width: int) -> dict[str, Any]:
    """Return the mixer of a model.

    Explicit models keep the state themselves, so Mamba2 has its usual, slow decay there.
    """
    heads = max(1, width // 32)
    rwkv7: dict[str, Any] = {
        "kind": "rwkv7", "n_heads": heads, "head_dim": 32, "decay_rank": 16, "rate_rank": 16,
        "gate_rank": 32, "negative_eigenvalues": True,
    }  # fmt: skip
    small = {"kind": "mamba2", "d_state": 32, "expand": 1, "head_dim": 32}
    fast = {**small, "dt_min": 0.1, "dt_max": 0.5, "a_max": 4}
    mixers: dict[str, dict[str, Any]] = {
        "mamba2": {"kind": "mamba2", "d_state": 64, "expand": 2, "head_dim": 32},
        "attention": {"kind": "attention", "n_heads": heads},
        "gated-deltanet": {
            "kind": "gated_deltanet", "n_heads": heads, "head_dim": 32, "expand_v": 1,
            "negative_eigenvalues": True, "chunk_size": 32,
        },
        "rwkv7": rwkv7,
        "implicit-rwkv7": rwkv7,
        "implicit-hybrid": {"kind": "hybrid", "mixers": [fast, rwkv7]},
        "hybrid": {"kind": "hybrid", "mixers": [small, rwkv7]},
    }  # fmt: skip
    return mixers[model]


def spec_of(base: str, task: str, model: str, rate: float, seed: int, changes: list[str]) -> RunSpec:
    """Return the spec of one run.

    Raises:
        ValueError: an invalid spec or override.

    """
    tree = resolve(base)
    training = {"seed": seed, "optimizer": {"learning_rate": rate}}
    tree = Section(merge(tree, {"data": {"name": task}, "training": training}))
    implicit = _validated(apply_overrides(tree, changes), base)
    if model == "implicit-mamba2":
        return implicit
    width = implicit.model.d_model  # type: ignore[attr-defined]  # of a language model
    # The spec with another mixer, which has its own sizes.
    kept = [text for text in changes if not text.startswith("model.mixer")]
    hybrid = _validated(apply_overrides(_mixed(tree, SIZE_OF, width), kept), base)
    if model == SIZE_OF:
        return hybrid
    target = parameters(hybrid)
    if model in IMPLICIT:
        return _closest(base, _mixed(tree, model, width), kept, target)
    # Explicit models do not search.
    changes = [text for text in changes if not text.startswith(("model.", "phases."))]
    mlp = {"mlp": {"kind": "swiglu", "d_ff": 2 * width}} if model == "attention" else {}
    own = {
        "kind": "explicit_lm", "d_model": width,
        "mixer": mixer_of(model, width), **mlp,
    }  # fmt: skip
    phases = [Section({k: v for k, v in phase.items() if k != "model"}) for phase in tree.get("phases", [])]
    return _closest(base, Section({**tree, "model": Section(own), "phases": phases}), changes, target)


def _mixed(tree: Section, model: str, width: int) -> Section:
    """Return the run with the mixer of an implicit model."""
    return Section(merge(tree, {"model": {"mixer": mixer_of(model, width)}}))


def _closest(base: str, tree: Section, changes: list[str], target: int) -> RunSpec:
    """Return the run with the number of layers whose parameter count is closest to ``target``."""
    specs = [
        _validated(apply_overrides(Section(merge(tree, {"model": {"n_layers": layers}})), changes), base)
        for layers in range(1, MOST_LAYERS + 1)
    ]
    return min(specs, key=lambda spec: abs(parameters(spec) - target))


def parameters(spec: RunSpec) -> int:
    """Return the number of parameters of a run's model."""
    counts = count_parameters(spec.model)
    if counts is None or counts.total is None:
        raise ValueError(f"the number of parameters of a {spec.model.kind} is not known; choose other sizes")
    return counts.total


def _validated(tree: Section, base: str) -> RunSpec:
    try:
        return validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=base) from None


def row_of(
    task: str, model: str, rate: float, seed: int, spec: RunSpec, folder: Path, device: str
) -> dict[str, Any]:
    """Train one model, or read its finished run, and return its results."""
    finished = train(spec, folder, name=folder.name, device=device)
    summary = finished.summary
    return {
        "task": task,
        "model": model,
        "layers": spec.model.n_layers,  # type: ignore[attr-defined]  # of a language model
        "learning_rate": rate,
        "seed": seed,
        "parameters": summary["parameters"],
        "steps": summary["steps"],
        "of_steps": spec.total_steps,
        "tokens": summary["tokens"],
        "seconds": round(summary["seconds"], 1),
        "device": summary["device"],
        "tests": [{key: test.get(key) for key in KEPT} for test in summary["evaluation"]],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the accuracy in percent at the longest test, in Markdown: a line per task, a column per model.

    Several seeds are listed. A run that a time limit ended is marked. The last column has the difference
    between the means of the implicit hybrid and of the best explicit model, in percentage points.
    """
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    compared = SIZE_OF in models and not {*models}.isdisjoint(EXPLICIT)
    head = [f"`{model}`" for model in models] + ["lead"] * compared
    lines = ["| task | " + " | ".join(head) + " |", "| --- |" + " --- |" * len(head)]
    for task in TASKS:
        best = {model: found for model in models if (found := _best(rows, task, model))}
        if not best:
            continue
        cells = [", ".join(map(_shown, best[model])) if model in best else "-" for model in models]
        if compared:
            means = {model: fmean(map(_at_longest, found)) for model, found in best.items()}
            explicit = [mean for model, mean in means.items() if model in EXPLICIT]
            known = SIZE_OF in means and explicit
            cells.append(f"{100 * (means[SIZE_OF] - max(explicit)):+.2f}" if known else "-")
        lines.append(f"| `{task}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _best(rows: list[dict[str, Any]], task: str, model: str) -> list[dict[str, Any]]:
    """Return for each seed the run whose learning rate is best at the shortest test."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if (row["task"], row["model"]) == (task, model):
            other = found.setdefault(row["seed"], row)
            found[row["seed"]] = max(other, row, key=_chosen_by)
    return [found[seed] for seed in sorted(found)]


def _chosen_by(row: dict[str, Any]) -> tuple[float, float, float]:
    test = row["tests"][0]
    return test["accuracy"], -test.get("loss", 0.0), -row["learning_rate"]  # older results have no loss


def _at_longest(row: dict[str, Any]) -> float:
    accuracy: float = row["tests"][-1]["accuracy"]
    return accuracy


def _shown(row: dict[str, Any]) -> str:
    return f"{100 * _at_longest(row):.2f}" + ("†" if row["steps"] < row["of_steps"] else "")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy at the longest test: what iteration adds to models of one size."""
    from trainer.reporting.pictures import BLUE, DARK, GREEN, GREY, ORANGE, finish, new_figure

    shades = ("#63b3ed", "#2c5282", BLUE, "#b794f4", ORANGE, GREY, GREEN, DARK)
    colors = dict(zip(MODELS, shades, strict=True))
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    width = 0.8 / len(models)
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    figure = new_figure(width=9.0, height=3.6, title="")
    axes = figure.subplots()
    for index, model in enumerate(models):
        best = {task: found for task in tasks if (found := _best(rows, task, model))}
        places = [tasks.index(task) + width * (index - (len(models) - 1) / 2) for task in best]
        heights = [100 * fmean(map(_at_longest, found)) for found in best.values()]
        layers = next(iter(best.values()))[0]["layers"]
        label = f"{model}, {layers} layer{'s' * (layers > 1)}"
        axes.bar(places, heights, width=0.94 * width, color=colors[model], label=label)
    axes.set_xticks(range(len(tasks)), [task.replace("_", "\n") for task in tasks])
    figure.legend(frameon=False, fontsize=9, ncols=3, loc="outside upper center")
    finish(axes, title="", x="", y="accuracy at 4 times\nthe training length (%)")
    figure.savefig(path, dpi=100)


def options_of(words: list[str]) -> argparse.Namespace:
    """Parse the command line; overrides may be at any position."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="state_tracking")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK")
    default = [SIZE_OF, *EXPLICIT]
    parser.add_argument("--models", nargs="+", default=default, choices=MODELS, metavar="MODEL")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of each run (10)")
    parser.add_argument("--runs", type=Path, default=Path("runs/state_tracking"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", default="state_tracking", help="name of the file in benchmarks/results")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the results, without training"
    )
    parser.add_argument("--picture", type=Path, help="with --table: also draw it into this file")
    changes = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in changes])
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes must be positive, got {options.minutes:g}")
    options.overrides = changes
    return options


def main() -> int:
    """Train and test every combination; write the results after each; return the exit status."""
    options = options_of(sys.argv[1:])
    path = RESULTS / f"{options.output}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    if options.table:
        print(table(rows))
        if options.picture is not None:
            draw(rows, options.picture)
        return 0
    try:
        carry_out(options, rows)
    except ValueError as error:
        return refuse(str(error))
    return 0


def carry_out(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Validate all specs first, then train; rows of the same combination are replaced."""
    for name in ("tasks", "models", "learning_rates", "seeds"):
        require_once(f"--{name.replace('_', '-')}", getattr(options, name))
    limit = f"callbacks=[{{kind: stop_when, value: seconds, above: {60 * options.minutes}}}]"
    plan = {
        one: spec_of(options.spec, *one, [limit, *options.overrides])
        for one in itertools.product(options.tasks, options.models, options.learning_rates, options.seeds)
    }
    for (task, model, rate, seed), spec in plan.items():
        folder = options.runs / f"{task}-{model}-{rate:g}-seed{seed}"
        row = row_of(task, model, rate, seed, spec, folder, options.device)
        key = {name: row[name] for name in ("task", "model", "learning_rate", "seed")}
        rows = [other for other in rows if any(other[name] != value for name, value in key.items())] + [row]
        write(options.output, {"machine": machine(), "rows": rows})
        tests = ", ".join(f"length {t['length']} {t['accuracy']:.2%}" for t in row["tests"])
        print(
            f"{task} {model} x{row['layers']} lr {rate:g} seed {seed}: {row['parameters']:,} parameters, "
            f"{tests}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
