"""What each solver, and each way of searching, costs on a trained model: iterations, work, time, error.

Every configuration searches for the fixed points of the same sequences to the same tolerances. Beside it: how
the map contracts at the points that were found, and what a Jacobian penalty changes about that.

Shape legend: B sequences, L tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from implicit_blocks._utils.devices import choose_device
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.registry import kinds
from implicit_blocks.specs import (
    AndersonSpec,
    BroydenSpec,
    ImplicitLMSpec,
    PatientPicardSpec,
    PicardSpec,
    SolverSpec,
)
from implicit_blocks.specs.families import Scope
from trainer.data.source import Batch
from trainer.experiments.penalty import measure as measure_penalties
from trainer.experiments.run_options import require_counts, require_tolerances
from trainer.experiments.runs import evaluation_batch, trained, trained_model
from trainer.experiments.searching import (
    Reference,
    SearchConfig,
    accuracy,
    counted,
    reference,
    search,
    spectrum,
)
from trainer.experiments.solvers_picture import draw
from trainer.specs.run import RunSpec
from trainer.storage.files import write_json


def configs(length: int) -> list[SearchConfig]:
    """Return what is compared, for sequences of a length."""
    damped = PicardSpec(damping=0.8)
    made = [
        SearchConfig("Picard", PicardSpec()),
        *(SearchConfig(f"Picard, damping {share}", PicardSpec(damping=share)) for share in (0.9, 0.8, 0.5)),
        *(SearchConfig(f"Anderson, memory {memory}", AndersonSpec(memory=memory)) for memory in (2, 5)),
        SearchConfig("Anderson, memory 5, damping 0.8", AndersonSpec(memory=5, damping=0.8)),
        *(SearchConfig(f"Broyden, memory {memory}", BroydenSpec(memory=memory)) for memory in (5, 20)),
        SearchConfig("Picard, patient", PatientPicardSpec()),
        SearchConfig("Picard 0.8, average of half", damped, call={"moving_average": 0.5}),
    ]
    if "reversible" in kinds("solver"):  # of the plugin, where it is installed
        made.append(SearchConfig("reversible", SolverSpec.model_validate({"kind": "reversible"})))
    for part in (size for size in (4, 16, 64) if size < length):
        made.append(SearchConfig(f"Picard 0.8, windows of {part}", damped, window_length=part))
    if length > 16:
        made.append(SearchConfig("Picard 0.5, windows of 16", PicardSpec(damping=0.5), window_length=16))
        made.append(SearchConfig("Broyden 5, windows of 16", BroydenSpec(memory=5), window_length=16))
    if length > 1:
        made += [
            SearchConfig("Picard 0.8, token by token", damped, window_length=1, scopes=("prefix",)),
            SearchConfig(
                "Picard 0.8, token by token, warm",
                damped,
                call={"window_length": 1, "warm_start": True},
                scopes=("prefix",),
            ),
            SearchConfig(
                "Picard 0.8, prefix committed", damped, commit_prefix=max(1, length // 16), scopes=("prefix",)
            ),
        ]
    return made


def run(
    folder: Path,
    checkpoints: Sequence[Path],
    *,
    tolerances: Sequence[float],
    sequences: int = 16,
    length: int | None = None,
    max_iterations: int = 512,
    repeats: int = 3,
    only: Sequence[str] = (),
    penalties: Sequence[float] = (),
    penalty_steps: int = 60,
    device: str = "auto",
) -> str:
    """Compare all ways on each trained model; write ``solvers.json`` and a picture a model; return a summary.

    Args:
        folder: made where it is missing.
        checkpoints: folders of runs, or checkpoints of theirs.
        tolerances: relative residuals that end a search.
        sequences: how many of the runs' evaluation data.
        length: tokens of each; None: the training length.
        max_iterations: of a search, and of each window's.
        repeats: measurements of a time, whose median counts.
        only: parts of names of ways, of which one must be in a way's name; none: all.
        penalties: weights of the Jacobian penalty with which a model is trained on; none: none.
        penalty_steps: for so many steps.
        device: name of the device.

    Raises:
        ValueError: no trained implicit model there, or settings out of range.

    """
    require_tolerances(tolerances)
    for weight in penalties:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"penalty {weight} is none; choose 0 (to train on without) or a number above it")
    require_counts(sequences=sequences, length=length, max_iterations=max_iterations)
    require_counts(repeats=repeats, penalty_steps=penalty_steps)
    place = choose_device(device)
    runs = [trained(checkpoint) for checkpoint in checkpoints]  # all, before hours pass with the first
    found = [
        _measure(
            (_once(number, runs), spec, weights),
            folder,
            tolerances=tolerances,
            sequences=sequences,
            length=length,
            max_iterations=max_iterations,
            repeats=repeats,
            only=only,
            penalties=penalties,
            penalty_steps=penalty_steps,
            device=place,
        )
        for number, (_, spec, weights) in enumerate(runs)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tolerances": list(tolerances),
        "max_iterations": max_iterations,
        "repeats": repeats,
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "time": "wall" if place.type == "cuda" else "processor",
    }
    write_json(folder / "solvers.json", {"experiment": "solvers", "settings": settings, "models": found})
    lines, written = [], [str(folder / "solvers.json")]
    for one in found:
        picture = folder / f"solvers_{one['run']}.png"
        draw(one, settings, picture)
        written.append(str(picture))
        lines += [table(one, tolerance=tolerance) for tolerance in sorted(tolerances, reverse=True)]
        lines.append(contraction(one["spectrum"]))
        lines += [penalty_table(one["penalties"])] if one["penalties"] else []
    return "\n".join([*lines, f"written: {', '.join(written)}"])


def _once(number: int, runs: Sequence[tuple[str, RunSpec, Path]]) -> str:
    """Return the name of a run among these; the second and later ones of a name are numbered."""
    names = [name for name, _, _ in runs]
    before = names[:number].count(names[number])
    return names[number] + (f"-{before + 1}" if before else "")


def _measure(
    run: tuple[str, RunSpec, Path],
    folder: Path,
    *,
    tolerances: Sequence[float],
    sequences: int,
    length: int | None,
    max_iterations: int,
    repeats: int,
    only: Sequence[str],
    penalties: Sequence[float],
    penalty_steps: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return what is found of one trained model."""
    name, spec, weights = run
    batch = evaluation_batch(spec, sequences=sequences, length=length).to(device)
    tokens = batch.inputs.shape[1]
    chosen = _chosen(tokens, only)
    model = trained_model(spec, weights)[0].to(device)
    tight = reference(model, batch, max_iterations)
    rows = compare(
        model,
        batch,
        chosen,
        tight,
        tolerances=tolerances,
        max_iterations=max_iterations,
        repeats=repeats,
    )
    trained_on: list[dict[str, Any]] = []
    if penalties:
        trained_on = measure_penalties(
            folder / "penalties" / name,
            spec,
            weights,
            weights_of_penalty=penalties,
            steps=penalty_steps,
            batch=batch,
            tolerances=tolerances,
            max_iterations=max_iterations,
            device=device,
        )
    return {
        "run": name,
        "checkpoint": str(weights),
        "sequences": len(batch),
        "length": tokens,
        "rows": rows,
        "spectrum": spectrum(model, batch, tight),
        "penalties": trained_on,
    }


def _chosen(length: int, only: Sequence[str]) -> list[SearchConfig]:
    """Return the ways with one of these parts in their names, or all."""
    known = configs(length)
    chosen = [
        config for config in known if not only or any(part.lower() in config.name.lower() for part in only)
    ]
    if not chosen:
        raise ValueError(
            f"no way of searching has {' or '.join(only)} in its name; there are "
            f"{', '.join(config.name for config in known)}"
        )
    return chosen


# ----------------------------------------------------------------------------------------------- searches


@torch.no_grad()
def compare(
    model: ImplicitLM,
    batch: Batch,
    chosen: Sequence[SearchConfig],
    tight: Reference,
    *,
    tolerances: Sequence[float],
    max_iterations: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Return a row for each way, scope and tolerance."""
    as_trained = model.spec
    rows = []
    for config in chosen:
        for scope in config.scopes:
            if config.solver.couples_tokens and scope == "prefix":
                continue
            for tolerance in sorted(tolerances, reverse=True):
                calls: list[tuple[int, int]] = []
                with counted(model, calls):
                    output, _ = search(model, batch, config, scope, tolerance, max_iterations)
                seconds, wall = [], []
                for _ in range(repeats):
                    began = time.perf_counter()
                    seconds.append(search(model, batch, config, scope, tolerance, max_iterations)[1])
                    wall.append(time.perf_counter() - began)
                solution = output.solution
                rows.append(
                    {
                        "way": config.name,
                        "scope": scope,
                        "tolerance": tolerance,
                        "iterations_mean": float(solution.iterations.double().mean()),
                        "iterations_max": int(solution.iterations.max()),
                        "calls": len(calls),
                        "work": sum(rows_ * tokens for rows_, tokens in calls) / batch.inputs.numel(),
                        "seconds": statistics.median(seconds),
                        "wall_seconds": statistics.median(wall),
                        "converged": float(solution.converged.double().mean()),
                        "diverged": float(solution.diverged.double().mean()),
                        "logit_error": float((output.logits - tight.logits).abs().max()),
                        "accuracy": accuracy(output.logits, batch.labels),
                        "state_bytes": state_bytes(config, scope, model.spec, length=batch.inputs.shape[1]),
                    }
                )
    model.reconfigure(as_trained)
    return rows


def state_bytes(config: SearchConfig, scope: Scope, spec: ImplicitLMSpec, *, length: int) -> int:
    """Return what the solver keeps for a token, in bytes, as its spec states it; float32."""
    tokens = 1 if scope == "prefix" else min(length, config.window_length or length)
    return -(-config.solver.state_bytes(tokens * spec.d_model, itemsize=4) // tokens)


# ------------------------------------------------------------------------------------------------- tables


def table(one: dict[str, Any], *, tolerance: float) -> str:
    """Return one model's rows at a tolerance as text, the scopes below each other."""
    rows = [row for row in one["rows"] if row["tolerance"] == tolerance]
    width = max(len(row["way"]) for row in rows)
    lines = [
        f"{one['run']}: {one['sequences']} sequences of {one['length']} tokens, tolerance {tolerance:g}",
        f"{'':<{width}}  {'scope':<8}  {'iterations':>10}  {'most':>5}  {'calls':>6}  {'work':>7}  "
        f"{'seconds':>8}  {'converged':>9}  {'error':>8}",
    ]
    for row in rows:
        lines.append(
            f"{row['way']:<{width}}  {row['scope']:<8}  {row['iterations_mean']:10.1f}  "
            f"{row['iterations_max']:5d}  {row['calls']:6d}  {row['work']:7.1f}  {row['seconds']:8.3f}  "
            f"{row['converged']:9.0%}  {row['logit_error']:8.1e}"
        )
    return "\n".join(lines)


def contraction(found: dict[str, Any]) -> str:
    """Return the spectrum in a sentence."""
    doubt = (
        f"\nWARNING: only {found['converged']:.0%} of the reference solutions converged; errors and radii of "
        "the others are not those of a fixed point"
    )
    return (
        f"spectral radius of single tokens' maps: median {found['median']:.3f}, "
        f"largest {found['largest']:.3f}, above one {found['above_one']:.0%} of {len(found['radii'])} "
        f"(eigenvectors off by at most "
        f"{found['residual_largest']:.0e})"
    ) + (doubt if found["converged"] < 1.0 else "")


def penalty_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return what training on with each weight of the penalty gave."""
    tolerances = list(rows[0]["iterations"])
    lines = [
        "penalty   loss      accuracy  size of J  radius (median, largest)  ms a step  iterations at "
        + ", ".join(tolerances)
    ]
    for row in rows:
        counts = ", ".join(f"{row['iterations'][tolerance]:.1f}" for tolerance in tolerances)
        weight = "before" if row["weight"] is None else f"{row['weight']:g}"
        step = "" if row["step_ms"] is None else f"{row['step_ms']:.0f}"
        lines.append(
            f"{weight:<8}  {row['loss']:<8.4f}  {row['accuracy']:8.2%}  {row['jacobian_size']:9.3f}  "
            f"{row['radius_median']:.3f}, {row['radius_largest']:.3f}              {step:>9}  {counts}"
        )
    return "\n".join(lines)
