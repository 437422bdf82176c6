"""The fair comparison: both sides tuned over one grid, chosen on held-out text, reported on held-out books.

Runs of the choice and reported runs have different seeds. Every run has a JSON file in the folder ``runs`` of
the output, so that an interrupted experiment continues, and runs of another machine can be copied there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from implicit_blocks._utils.devices import choose_device, device_name
from trainer.data.token_folder import open_tokens
from trainer.experiments.common.checks import require_counts
from trainer.experiments.equal_compute.compare import (
    better_weights,
    choose,
    converged_share,
    difference,
    marks,
    require_comparable,
)
from trainer.experiments.equal_compute.grid import Grid
from trainer.experiments.equal_compute.plan import KINDS, SIDES, Comparison, comparisons
from trainer.experiments.equal_compute.plot import draw
from trainer.experiments.equal_compute.recipes import Recipe
from trainer.experiments.equal_compute.runs import read_results, train_recipes
from trainer.experiments.equal_compute.tables import table
from trainer.reporting.metrics import json_value
from trainer.reporting.pictures import write_results

NAME = "equal_compute"

Rows = Mapping[str, Mapping[str, Any]]
"""Results by name."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared; see the command's options."""

    kinds: tuple[str, ...] = tuple(KINDS)
    families: tuple[str, ...] = ("llama", "mamba2")
    normalizations: tuple[str, ...] = ("qk_norm",)
    optimizers: tuple[str, ...] = ("adamw",)
    shapes: tuple[str, ...] = ("1-2-1x3+8@.8",)
    layers: tuple[int, ...] = (8, 12)
    widths: tuple[int, ...] = ()
    width: int = 256
    injection: str = "residual"
    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    weight_decays: tuple[float, ...] = (0.75, 1.5, 3.0)
    shares: tuple[float, ...] = (0.6, 1.0)
    petaflops: float = 1.83
    fresh_petaflops: float = 0.15
    average: float | tuple[float, ...] | None = (0.997, 0.998, 0.999, 0.9995)
    batch_size: int = 16
    length: int = 512
    precision: str = "bfloat16"
    choosing_seeds: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    widen: int = 0
    sequences: int | None = None
    side_by_side: int = 6
    only_finished: bool = False

    def __post_init__(self) -> None:
        require_counts(
            width=self.width,
            batch_size=self.batch_size,
            length=self.length,
            sequences=self.sequences,
            side_by_side=self.side_by_side,
        )
        if both := sorted(set(self.choosing_seeds) & set(self.seeds)):
            raise ValueError(
                f"seeds {both} choose the recipe and are reported; a reported seed must not have chosen, so "
                "give other --seeds or --choosing-seeds"
            )
        if not self.choosing_seeds or not self.seeds:
            raise ValueError("give at least one seed that chooses, and one that is reported")
        if self.widen < 0:
            raise ValueError(f"widen must be at least 0, got {self.widen}")


LAPTOP: dict[str, Any] = {
    "kinds": ("equal_size",),
    "families": ("llama",),
    "shapes": ("1-1-1x2",),
    "layers": (5,),
    "width": 64,
    "learning_rates": (2e-3, 4e-3, 8e-3),
    "weight_decays": (0.75, 1.5, 3.0),
    "shares": (1.0,),
    "petaflops": 5e-4,
    "fresh_petaflops": 1e-5,
    "average": (0.98, 0.99, 0.995, 0.998),
    "batch_size": 4,
    "length": 64,
    "precision": "float32",
    "sequences": 64,
    "side_by_side": 1,
}
"""Settings that take minutes on a CPU, for a text of about 12,000 tokens that is seen about 30 times."""


def run(folder: Path, data: Path, report: Path, *, settings: Settings, device: str = "auto") -> str:
    """Train missing runs, compare both sides, write ``equal_compute.json`` and ``.png``, return a summary.

    Args:
        folder: of the output, created if missing.
        data: tokens with a validation split, on which recipes are chosen.
        report: tokens of the books on which figures are reported.
        settings: what is compared.
        device: name of the device.

    Raises:
        ValueError: the settings or the tokens cannot be used, the sides are not comparable, or no comparison
            has finished runs on both sides.

    """
    runs = folder / "runs"

    def train(recipes: Iterable[Recipe], *, brief: bool = False) -> Rows:
        wanted = list({recipe.name: recipe for recipe in recipes}.values())
        if not settings.only_finished:
            train_recipes(
                wanted,
                runs,
                data=data,
                report=report,
                device=device,
                side_by_side=settings.side_by_side,
                sequences=settings.sequences,
                brief=brief,
            )
        names = {recipe.name for recipe in wanted}
        return {row["name"]: row for row in read_results(runs) if row["name"] in names}

    grid = Grid(
        learning_rates=settings.learning_rates, weight_decays=settings.weight_decays, shares=settings.shares
    )
    open_tokens(report)  # refused before anything is trained
    base = base_recipe(settings, vocab_size=open_tokens(data).vocab_size or 8192)
    rounds = 0
    while True:
        plans = _plans(base, settings, grid)
        rows = train(
            (
                point
                for plan in plans
                for side in SIDES
                for point in plan.points(side, settings.choosing_seeds)
            ),
            brief=True,
        )
        chosen = {id(plan): _chosen(plan, rows, settings) for plan in plans}
        wider = grid.widened(one for both in chosen.values() for one in both.values())
        if rounds == settings.widen or wider == grid:
            break
        grid, rounds = wider, rounds + 1
    reported = train(
        recipe.with_seed(seed)
        for both in chosen.values()
        for recipe in both.values()
        for seed in settings.seeds
    )
    found = [
        _compared(plan, chosen[id(plan)], rows, reported, settings)
        for plan in plans
        if len(chosen[id(plan)]) == 2
    ]
    if not found:
        raise ValueError(
            f"no comparison has finished runs on both sides in {runs}; omit --only-finished to train them"
        )
    written = json_value(
        {
            "experiment": NAME,
            "settings": asdict(settings),
            "grid": asdict(grid),
            "widened": rounds,
            "device": device_name(choose_device(device)),
            "comparisons": found,
            "runs": [short(row) for row in ({**rows, **reported}).values()],
        }
    )
    message = write_results(folder, NAME, written, draw)
    return f"{table(written)}\n{message}"


def base_recipe(settings: Settings, *, vocab_size: int) -> Recipe:
    """Return the fields that all runs of an experiment share, as an explicit model of one layer."""
    return Recipe(
        family="llama",
        layers=(0, 1, 0),
        width=settings.width,
        injection=settings.injection,
        learning_rate=settings.learning_rates[0],
        weight_decay=settings.weight_decays[0],
        petaflops=settings.petaflops,
        average=settings.average,
        batch_size=settings.batch_size,
        length=settings.length,
        vocab_size=vocab_size,
        precision=settings.precision,
    )


def _plans(base: Recipe, settings: Settings, grid: Grid) -> list[Comparison]:
    return comparisons(
        base,
        kinds=settings.kinds,
        families=settings.families,
        normalizations=settings.normalizations,
        optimizers=settings.optimizers,
        shapes=settings.shapes,
        layers=settings.layers,
        widths=settings.widths,
        grid=grid,
        fresh_petaflops=settings.fresh_petaflops,
    )


def _tuning(plan: Comparison, side: Any, rows: Rows, settings: Settings) -> tuple[list[Any], list[str]]:
    """Return the finished runs that tune a side, and the names of those that are missing."""
    names = [point.name for point in plan.points(side, settings.choosing_seeds)]
    return [rows[name] for name in names if name in rows], [name for name in names if name not in rows]


def _chosen(plan: Comparison, rows: Rows, settings: Settings) -> dict[str, Recipe]:
    """Return the recipe that each side chose; a side without finished runs is left out."""
    found = {side: _tuning(plan, side, rows, settings)[0] for side in SIDES}
    return {side: choose(finished) for side, finished in found.items() if finished}


def _compared(
    plan: Comparison, chosen: Mapping[str, Recipe], rows: Rows, reported: Rows, settings: Settings
) -> dict[str, Any]:
    """Return one comparison as JSON values.

    Raises:
        ValueError: the sides are not comparable.

    """
    sides: dict[str, Any] = {}
    results: dict[str, list[Any]] = {}
    everything: list[Any] = []
    for side in SIDES:
        tuned, missing = _tuning(plan, side, rows, settings)
        recipe = chosen[side]
        names = [recipe.with_seed(seed).name for seed in settings.seeds]
        results[side] = [reported[name] for name in names if name in reported]
        everything += [*tuned, *results[side]]
        warnings = [f"not tuned over the whole grid: {len(missing)} runs are missing"] if missing else []
        warnings += [f"the best value is {edge}; widen the grid" for edge in plan.grid.edges(recipe)]
        warnings += [
            f"the {axis} was not tuned" for axis in plan.grid.untuned() if axis != "share of the budget"
        ]
        warnings += [f"{row['name']}: {mark}" for row in results[side] for mark in marks(row, plan.grid)]
        sides[side] = {
            "recipe": recipe.as_row(),
            "shape": recipe.shape,
            "runs": [row["name"] for row in results[side]],
            "tuned": [row["name"] for row in tuned],
            "marks": warnings,
        }
    require_comparable(everything, equal_parameters=plan.kind == "equal_size", once=plan.kind == "fresh_text")
    usable = {
        side: [row for row in rows_of if better_weights(row) is not None] for side, rows_of in results.items()
    }
    both = usable["implicit"] and usable["explicit"]
    return {
        "kind": plan.kind,
        "title": plan.title,
        "family": plan.family,
        "normalization": plan.normalization,
        "optimizer": plan.optimizer,
        "grid": asdict(plan.grid),
        "sides": sides,
        "result": difference(usable["implicit"], usable["explicit"]) if both else None,
    }


def short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tables and the picture need of a run."""
    best = better_weights(row)
    keys = ("name", "recipe", "side", "shape", "parameters", "steps", "tokens", "epochs", "flops", "seconds")
    searched = ("loops", "few_loops", "trained_loops_few", "fixed_point")
    measured = (*searched, "lengths", "lengths_scaled", "lengths_fixed_point")
    return {
        **{key: row[key] for key in keys},
        **{key: None if best is None else best.get(key) for key in measured},
        "choice": None if best is None else best["choice"]["perplexity"],
        "report": None if best is None else best["report"]["perplexity"],
        "weights": {
            name: {on: row[key][on]["perplexity"] for on in ("choice", "report")}
            | ({"decay": row[key]["decay"]} if "decay" in row[key] else {})
            for name, key in (("last", "measured"), ("averaged", "averaged"))
            if row.get(key) is not None
        },
        "converged": converged_share(row),
        "marks": marks(row),
        "captured": row["captured"],
    }


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return settings with these values in place of theirs; None keeps a value."""
    return replace(settings, **{key: value for key, value in values.items() if value is not None})
