"""Runs of recipes: trained side by side, measured, and kept as one JSON file each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_blocks._utils.devices import choose_device, device_name
from trainer.data.source import EvaluationSet
from trainer.experiments.common.runs import data_of
from trainer.experiments.equal_compute.compare import better_weights
from trainer.experiments.equal_compute.flops import run_flops
from trainer.experiments.equal_compute.measure import (
    BUDGETS,
    CHOICE,
    REPORT,
    Measuring,
    evaluation_sets,
    windows,
)
from trainer.experiments.equal_compute.recipes import Recipe, spec_of
from trainer.reporting.metrics import json_value, rounded
from trainer.run.side_by_side import Planned, Trained, train_side_by_side
from trainer.storage.files import read_json, write_json

CURVE = 50
"""Number of points of the curve of the training loss."""


def result_path(folder: Path, recipe: Recipe) -> Path:
    """Return the file of a recipe's result."""
    return folder / f"{recipe.name}.json"


def train_recipes(
    recipes: Sequence[Recipe],
    folder: Path,
    *,
    data: Path,
    report: Path,
    device: str = "auto",
    seconds: float = math.inf,
    side_by_side: int = 6,
    sequences: int | None = None,
    brief: bool = False,
    eager: str | None = None,
    compile_layers: bool = False,
    log: Callable[[str], object] = print,
) -> list[str]:
    """Train the recipes whose results are missing, in their order; return the names of those not finished.

    Args:
        recipes: the runs, the most important first.
        folder: of the results, one JSON file per run.
        data: tokens with a validation split, on which recipes are chosen.
        report: tokens of the books on which the figures are reported.
        device: such as ``cuda``; ``auto`` is CUDA if available.
        seconds: after which no step is launched any more.
        side_by_side: number of models that train at a time.
        sequences: of each evaluation set; None: as many as the run's spec says.
        brief: measure only the perplexities on both sets, as is enough for a choice.
        eager: why no step is captured as a CUDA graph; None: steps are captured where that is possible.
        compile_layers: whether training runs layers that are compiled (``training.compile_layers``).
        log: called with lines of progress.

    Raises:
        ValueError: a recipe is not valid or given twice, or the tokens cannot be used.

    """
    began, place = time.monotonic(), choose_device(device)
    folder.mkdir(parents=True, exist_ok=True)
    names = [recipe.name for recipe in recipes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: given twice; leave one out")
    by_name = {recipe.name: recipe for recipe in recipes}
    queue = []
    for recipe in recipes:
        if not _is_finished(result_path(folder, recipe), recipe):
            spec = spec_of(recipe, data)
            if compile_layers:
                training = spec.training.model_copy(update={"compile_layers": True})
                spec = spec.model_copy(update={"training": training})
            queue.append(Planned(recipe.name, spec, run_flops(spec, bound=recipe.bounded), recipe.averages))
    log(f"{len(recipes) - len(queue)} of {len(recipes)} runs are finished")
    measuring = [0.0]

    def end(one: Trained) -> None:
        start = time.monotonic()
        recipe = by_name[one.planned.name]
        with one.step.in_stream():
            row = _result(one, recipe, report=report, device=place, sequences=sequences, brief=brief)
        write_json(result_path(folder, recipe), row)
        measuring[0] = max(measuring[0], time.monotonic() - start)
        log(f"{recipe.name}: {_line(row)} ({time.monotonic() - began:.0f} s)")

    return train_side_by_side(
        queue,
        device=place,
        on_end=end,
        side_by_side=side_by_side,
        seconds=seconds - (time.monotonic() - began),
        spare=5.0,
        eager=eager,
        log=log,
    )


def _is_finished(path: Path, recipe: Recipe) -> bool:
    """Whether the file has the result of this recipe.

    Raises:
        ValueError: it has the result of another recipe.

    """
    if not path.is_file():
        return False
    kept, wanted = read_json(path)["recipe"], json_value(recipe.as_row())
    default = {key: field.default for key, field in Recipe.__dataclass_fields__.items()}
    if changed := sorted(key for key in wanted if kept.get(key, default[key]) != wanted[key]):
        raise ValueError(
            f"{path} is the result of a run with other {', '.join(changed)}; choose another folder"
        )
    return True


def _result(
    one: Trained, recipe: Recipe, *, report: Path, device: torch.device, sequences: int | None, brief: bool
) -> dict[str, Any]:
    """Return the result of a run as JSON values."""
    spec, step = one.planned.spec, one.step
    losses = step.losses()
    forget_compiled(one.model)
    data = data_of(spec)
    tokens = one.samples * spec.data.seq_len
    start = time.monotonic()
    sets = evaluation_sets(spec, report, sequences=sequences)
    # Its weights are those of the last step; without an end they are worth no evaluation.
    look = Measuring(one.model, spec, device=device, meanwhile=one.meanwhile)
    measured, averaged = (None, None) if one.ended else _measured(one, look, sets, None if brief else report)
    row: dict[str, Any] = json_value(
        {
            "name": recipe.name,
            "recipe": recipe.as_row(),
            "side": recipe.side,
            "shape": recipe.shape,
            "parameters": sum(p.numel() for p in one.model.parameters()),
            "steps": step.done,
            "planned_steps": one.total,
            "ended_early": one.ended,
            "tokens": tokens,
            "epochs": None if data.samples is None else rounded(one.samples / data.samples),
            "text": dict(data.identity()),
            "windows": windows(sets),
            "flops": one.planned.flops * step.done / one.total,
            "flops_per_token": one.planned.flops / (spec.total_tokens),
            "skipped_steps": int((~losses.isfinite()).sum()),
            "train_loss": _curve(losses),
            "seconds": rounded(one.seconds, 4),
            "measuring_seconds": rounded(time.monotonic() - start, 4),
            "captured": step.not_captured is None,
            "compiled": spec.training.compile_layers,
            "not_captured": step.not_captured,
            "measured": measured,
            "averaged": averaged,
            "device": device_name(device),
            "spec": spec.model_dump(mode="json"),
        }
    )
    return row


def _measured(
    one: Trained, look: Measuring, sets: dict[str, EvaluationSet], report: Path | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the measurements of the last and of the averaged weights, if these exist.

    Only the weights that are best on the text of the choice are measured in full.
    """
    if not one.planned.averages:
        return look.measure(sets, report), None
    measured, averages = look.measure(sets, None), []
    for decay in one.planned.averages:
        with one.step.averaged(decay):
            averages.append({"decay": decay, **look.measure(sets, None)})
    averaged = min(averages, key=_loss)
    is_better = _loss(averaged) < _loss(measured)
    if report is not None:
        with one.step.averaged(averaged["decay"]) if is_better else nullcontext():
            (averaged if is_better else measured).update(look.measure({REPORT: sets[REPORT]}, report))
    averaged["averages"] = [
        {"decay": row["decay"], **{key: row[key]["perplexity"] for key in (CHOICE, REPORT)}}
        for row in averages
    ]
    return measured, averaged


def _loss(measured: dict[str, Any]) -> float:
    found = measured[CHOICE]["loss"]
    return math.inf if found is None else float(found)


def forget_compiled(model: nn.Module) -> None:
    """Run compiled layers eagerly: an evaluation has many shapes, each of which occurs once."""
    for module in model.modules():
        module._compiled_call_impl = None


def _curve(losses: torch.Tensor) -> list[list[float]]:
    """Return the mean training loss of equal parts of the run: last step of each, and the mean."""
    size = max(1, -(-len(losses) // CURVE))
    ends = range(size, len(losses) + size, size)
    return [
        [min(end, len(losses)), rounded(float(part.double().mean()))]
        for end, part in zip(ends, losses.split(size), strict=True)
    ]


def _line(row: dict[str, Any]) -> str:
    if row["ended_early"]:
        return f"ended early: {row['ended_early']}"
    measured = better_weights(row)
    assert measured is not None
    more = "".join(f", @{one['loops']} {one['perplexity']:.2f}" for one in measured.get("loops", ()))
    share = "".join(
        f", {one['solver']} {one['token_converged']:.1%} ({one['perplexity']:.2f})"
        for one in measured.get("fixed_point", ())
        if one["max_iterations"] == max(BUDGETS)
    )
    share += "".join(
        f", length {one['length']} {one['perplexity']:.2f}" for one in measured.get("lengths", ())
    )
    return (
        f"choice {measured['choice']['perplexity']:.2f}, report {measured['report']['perplexity']:.2f}"
        f"{more}{share}, {row['epochs']:.1f} epochs, {row['flops'] / 1e15:.3f} PFLOP, {row['seconds']:.0f} s"
    )


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, by name."""
    found = [read_json(path) for path in sorted(folder.glob("*.json"))]
    return [row for row in found if isinstance(row, dict) and "recipe" in row]
