"""Ablations of the looped Llama at equal compute: what each part of its recipe changes.

    python benchmarks/equal_compute_gpu.py ablations --data DIR --report DIR --output DIR --summary FILE
    python benchmarks/equal_compute_gpu.py 'ablations/loops: 2 throughout' --data DIR --report DIR …
    python benchmarks/equal_compute_ablations.py FILE

Every row changes one part of the base recipe (1-2-1 with 3 loops, 8 in the last fifth of the steps, residual
injection) and executes the same FLOPs on the same text. Changes that are not fields of a recipe are settings
of the run, as ``python -m trainer`` takes them. The list ``ablations_eager`` has the rows whose steps cannot
be captured, which are best trained in a process of their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equal_compute_averaged import markdown
from equal_compute_gpu import LLAMA
from equal_compute_gpu import LOOPED as BASE
from equal_compute_parts import BOUNDED_GATES, stages
from equal_compute_seeds import by_recipe, mean_perplexity

from trainer.experiments.equal_compute.recipes import Recipe
from trainer.experiments.equal_compute.tables import at_fixed_point

Row = dict[str, Any]
COMMON: Row = {**LLAMA, "learning_rate": 2e-3, "weight_decay": 1.5}
THROUGHOUT: Row = {"layers": [1, 2, 1], "loops": 3}
RATES = "{kind: warmup_constant_sqrt, warmup: 0.02, decay: 0.3, final_learning_rate: 1e-5}"
MAMBA2: Row = {
    "family": "mamba2", "width": 320, "weight_norm": True, "weight_decay": 2.0,
    "average": [0.99, 0.995, 0.998, 0.999, 0.9995],
}  # fmt: skip
SEARCHED = (
    "model.depth.kind=until_converged",
    "model.stopping={tolerance: 0, max_iterations: 3}",
    "phases=[{name: three, until: 0.8}, {name: end, model: {stopping: {max_iterations: 8}}}]",
)
"""A search of 3 iterations, and of 8 in the last fifth, in the place of loops; all of them are executed."""
TO_TOLERANCE = (
    *SEARCHED[:2],
    "phases=[{name: three, until: 0.8}, {name: end, until: 0.95, model: {stopping: {max_iterations: 8}}}, "
    "{name: last, model: {stopping: {tolerance: 0.01, max_iterations: 16}}}]",
)
"""The same with a search to a tolerance in the last twentieth, whose FLOPs are bounded by its maximum."""
PHANTOM = "model.gradient={kind: phantom, steps: 3}"
ANDERSON = "model.solver={kind: anderson, memory: 2}"


def _changed(*changes: str, base: Row = BASE) -> Row:
    return {**base, "changes": list(changes)}


def _rewarmed(at: float) -> str:
    return f"training.schedule={{kind: rewarmed, at: {at:g}, warmup: 0.01, schedule: {RATES}}}"


GROUPS: dict[str, dict[str, Row]] = {
    "base": {"base": BASE, "explicit, 4 layers": {"layers": [0, 4, 0]}},
    "injection": {
        kind: {**BASE, "injection": kind} for kind in ("none", "add", "concat", "diagonal", "attractor")
    },
    "layers that iterate": {
        "all, 0-4-0": {**BASE, "layers": [0, 4, 0]},
        "first half, 0-2-2": {**BASE, "layers": [0, 2, 2]},
        "second half, 2-2-0": {**BASE, "layers": [2, 2, 0]},
        "one of four, 2-1-1": {**BASE, "layers": [2, 1, 1]},
        "three of four, 1-3-0": {**BASE, "layers": [1, 3, 0]},
        "8.5 M parameters, 2-4-2": {**BASE, "layers": [2, 4, 2]},
        "11.7 M parameters, 4-4-4": {**BASE, "layers": [4, 4, 4]},
    },
    "loops": {f"{n} throughout": {**THROUGHOUT, "loops": n} for n in (2, 3, 4)}
    | {"3, 16 from 85%": {**BASE, "end_loops": 16, "end_from": 0.85}},
    "late loops": {
        **{f"3 from {at:.0%}": {**BASE, "loops_from": at} for at in (0.5, 0.6, 0.75)},
        "8 from 85%": {**THROUGHOUT, "loops": 8, "loops_from": 0.85, "gradient_loops": 3},
        **{
            f"3 from {at:.0%}, rate warmed up again": _changed(_rewarmed(at), base={**BASE, "loops_from": at})
            for at in (0.5, 0.75)
        },
        "1, 2, 3 and 4 for a quarter each": _changed(stages(1, 2, 3, 4), base={**THROUGHOUT, "loops": 4}),
    },
    "gradient": {
        "of the last loop": {**BASE, "gradient_loops": 1},
        "of the last 2 loops": {**BASE, "gradient_loops": 2},
        "3 phantom steps": _changed(*SEARCHED, PHANTOM, base=THROUGHOUT),
        "one adjoint step": _changed(*SEARCHED, "model.gradient={kind: one_step_adjoint}", base=THROUGHOUT),
        "adjoint solve of 3 iterations": _changed(
            *SEARCHED,
            "model.gradient={kind: implicit_function, stopping: {tolerance: 0, max_iterations: 3}}",
            base=THROUGHOUT,
        ),
    },
    "convergence": {
        "damping 0.8": {**BASE, "damping": 0.8},
        "damping 0.5": {**BASE, "damping": 0.5},
        "penalty on the residual 1": {**BASE, "residual_weight": 1.0},
        "penalty on the residual 4": {**BASE, "residual_weight": 4.0},
        "penalty on the Jacobian, 3 phantom steps": _changed(
            *SEARCHED,
            "model.gradient={kind: jacobian_penalty, weight: 0.1, gradient: {kind: phantom, steps: 3}}",
            base=THROUGHOUT,
        ),
        "Anderson acceleration, 3 phantom steps": _changed(*SEARCHED, PHANTOM, ANDERSON, base=THROUGHOUT),
        "to a tolerance of 0.01 from 95%, 3 phantom steps": _changed(
            *TO_TOLERANCE, PHANTOM, base={**THROUGHOUT, "bounded": True}
        ),
    },
    "random depth": {
        "1 to 5 loops": _changed("model.depth={kind: uniform, low: 1, high: 5}", base=THROUGHOUT),
        "Poisson, mean 3, at most 8": _changed(
            "model.depth={kind: poisson, mean: 3, maximum: 8}", base=THROUGHOUT
        ),
    },
    "branches and losses": {
        "branches scaled by 0.5": _changed("model.residual_scaling={kind: layer_scale, init: 0.5}"),
        "branches scaled by 0.25": _changed("model.residual_scaling={kind: layer_scale, init: 0.25}"),
        "explicit, branches scaled by 0.5": _changed(
            "model.residual_scaling={kind: layer_scale, init: 0.5}", base={"layers": [0, 4, 0]}
        ),
        "gates of at most 0.75": _changed(BOUNDED_GATES),
        "losses of loops 1, 2 and the last": _changed("model.objective={kind: iterates, at: [1, 2, last]}"),
    },
    "Mamba2": {
        "3 loops, 8 from 80%": {**MAMBA2, **BASE},
        "4 explicit layers": {**MAMBA2, "layers": [0, 4, 0]},
        "damping 0.8": {**MAMBA2, **BASE, "damping": 0.8},
        "damping 0.5": {**MAMBA2, **BASE, "damping": 0.5},
        "gates of at most 0.75": _changed(BOUNDED_GATES, base={**MAMBA2, **BASE}),
        "3 phantom steps": _changed(*SEARCHED, PHANTOM, base={**MAMBA2, **THROUGHOUT}),
        "Anderson acceleration, 3 phantom steps": _changed(
            *SEARCHED, PHANTOM, ANDERSON, base={**MAMBA2, **THROUGHOUT}
        ),
    },
}
"""Rows by group and label."""
SEEDS = {"base": (0, 1, 2), "explicit, 4 layers": (0, 1, 2)}
"""Seeds of the rows that have several, by label; the others have seed 0."""


def is_eager(row: Row) -> bool:
    """Return whether the steps of a row search, and cannot be captured."""
    return any("until_converged" in change for change in row.get("changes", ()))


def runs(*, eager: bool) -> list[Row]:
    """Return the recipes of all rows, those that are captured or those that are not."""
    return [
        run
        for rows in GROUPS.values()
        for label, row in rows.items()
        if is_eager(row) == eager
        for run in _with_seeds(label, row)
    ]


def _with_seeds(label: str, row: Row) -> list[Row]:
    """Return the recipes of a row, one for each of its seeds."""
    return [{**COMMON, **row, "seed": seed} for seed in SEEDS.get(label, (0,))]


def name_of(group: str, label: str) -> str:
    """Return the name of a row in the table."""
    return label if group == "base" else f"{group}: {label}"


def row_runs(name: str) -> list[Row]:
    """Return the recipes of the row with this name, one for each of its seeds.

    Raises:
        ValueError: there is no such row.

    """
    named = {
        name_of(group, label): (label, row) for group, rows in GROUPS.items() for label, row in rows.items()
    }
    if name not in named:
        raise ValueError(f"no row of the ablations is named {name!r}; choose one of {', '.join(named)}")
    return _with_seeds(*named[name])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return results as a Markdown table, group by group; rows without a result are left out.

    Rows have seed 0, and recipes with several seeds a row with their means, too.
    """
    results = by_recipe(found)
    head = ("change", "parameters", "passes", "choice", "report", "last weights", "fixed point", "converged")
    lines: list[tuple[str, ...]] = [head]
    for group, rows in GROUPS.items():
        for label, row in rows.items():
            if kept := results.get(Recipe.of({**COMMON, **row})):
                name = name_of(group, label)
                lines.append((name, *_cells([run for run in kept if run["recipe"]["seed"] == 0])))
                if len(kept) > 1:
                    lines.append((f"{name}, mean of {len(kept)} seeds", *_cells(kept)))
    return markdown(lines)


def _cells(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    points = [one for one in map(at_fixed_point, runs) if one is not None]
    converged = ("", "")  # of an explicit model
    if points:
        change, share = (sum(column) / len(points) for column in zip(*points, strict=True))
        converged = (f"{change:+.1%}", f"{share:.1%}")
    last = [{"report": run["weights"]["last"]["report"]} for run in runs]
    return (
        f"{runs[0]['parameters'] / 1e6:.1f} M",
        f"{runs[0]['epochs']:.1f}",
        f"{mean_perplexity(runs, 'choice'):.2f}",
        f"{mean_perplexity(runs):.2f}",
        f"{mean_perplexity(last):.2f}",
        *converged,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="files that --summary wrote")
    options = parser.parse_args(arguments)
    found = [run for path in options.results for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    print(table(found))


if __name__ == "__main__":
    main()
