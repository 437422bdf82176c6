"""Cost of each solver and search configuration on a trained model: iterations, work, time, error.

Every configuration searches for the fixed points of the same sequences at the same tolerances. Also measured:
how the map contracts at the fixed points, and the effect of a Jacobian penalty.

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
from trainer.experiments.common.checks import require_counts, require_tolerances
from trainer.experiments.common.runs import evaluation_batch, find_trained_run, load_trained_model
from trainer.experiments.common.search import (
    Reference,
    SearchConfig,
    accuracy,
    record_calls,
    reference,
    search,
    spectrum,
)
from trainer.experiments.solvers.jacobian_penalty import measure as measure_penalties
from trainer.experiments.solvers.plot import draw
from trainer.specs.run import RunSpec
from trainer.storage.files import write_json


def configs(length: int) -> list[SearchConfig]:
    """Return the configurations to compare, for sequences of a length."""
    damped = PicardSpec(damping=0.8)
    found = [
        SearchConfig("Picard", PicardSpec()),
        *(SearchConfig(f"Picard, damping {share}", PicardSpec(damping=share)) for share in (0.9, 0.8, 0.5)),
        *(SearchConfig(f"Anderson, memory {memory}", AndersonSpec(memory=memory)) for memory in (2, 5)),
        SearchConfig("Anderson, memory 5, damping 0.8", AndersonSpec(memory=5, damping=0.8)),
        *(SearchConfig(f"Broyden, memory {memory}", BroydenSpec(memory=memory)) for memory in (5, 20)),
        SearchConfig("Picard, patient", PatientPicardSpec()),
        SearchConfig("Picard 0.8, average of half", damped, call={"moving_average": 0.5}),
    ]
    if "reversible" in kinds("solver"):  # a plugin, if installed
        found.append(SearchConfig("reversible", SolverSpec.model_validate({"kind": "reversible"})))
    for part in (size for size in (4, 16, 64) if size < length):
        found.append(SearchConfig(f"Picard 0.8, windows of {part}", damped, window_length=part))
    if length > 16:
        found.append(SearchConfig("Picard 0.5, windows of 16", PicardSpec(damping=0.5), window_length=16))
        found.append(SearchConfig("Broyden 5, windows of 16", BroydenSpec(memory=5), window_length=16))
    if length > 1:
        found += [
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
    return found


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
    """Compare all configurations on each model, write the results and plots, return a summary.

    Writes ``solvers.json`` and one plot per model.

    Args:
        folder: output directory, created if missing.
        checkpoints: run directories, or checkpoints.
        tolerances: relative residuals at which a search stops.
        sequences: number of evaluation sequences.
        length: tokens per sequence; None: the training length.
        max_iterations: maximum iterations per search, and per window.
        repeats: number of time measurements; the median is reported.
        only: substrings of configuration names, one of which must match; empty: all configurations.
        penalties: weights of a Jacobian penalty for further training; empty: none.
        penalty_steps: number of those training steps.
        device: name of the device.

    Raises:
        ValueError: there is no trained implicit model, or a setting is invalid.

    """
    require_tolerances(tolerances)
    for weight in penalties:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"penalty must be finite and at least 0 (0: train without it), got {weight}")
    require_counts(sequences=sequences, length=length, max_iterations=max_iterations)
    require_counts(repeats=repeats, penalty_steps=penalty_steps)
    place = choose_device(device)
    # Find all runs before hours of work on the first.
    runs = [find_trained_run(checkpoint) for checkpoint in checkpoints]

    def measure(name: str, spec: RunSpec, weights: Path) -> dict[str, Any]:
        """Return the measurements of one trained model."""
        batch = evaluation_batch(spec, sequences=sequences, length=length).to(place)
        tokens = batch.inputs.shape[1]
        chosen = _chosen(tokens, only)
        model = load_trained_model(spec, weights)[0].to(place)
        tight = reference(model, batch, max_iterations)
        limits: Any = {"tolerances": tolerances, "max_iterations": max_iterations}
        rows = compare(model, batch, chosen, tight, repeats=repeats, **limits)
        trained_on: list[dict[str, Any]] = []
        if penalties:
            trained_on = measure_penalties(
                folder / "penalties" / name,
                spec,
                weights,
                penalty_weights=penalties,
                steps=penalty_steps,
                batch=batch,
                device=place,
                **limits,
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

    found = [measure(_once(number, runs), spec, weights) for number, (_, spec, weights) in enumerate(runs)]
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
    """Return a unique name of a run: the second and later runs of a name are numbered."""
    names = [name for name, _, _ in runs]
    before = names[:number].count(names[number])
    return names[number] + (f"-{before + 1}" if before else "")


def _chosen(length: int, only: Sequence[str]) -> list[SearchConfig]:
    """Return the configurations whose names contain one of these substrings, or all."""
    known = configs(length)
    chosen = [
        config for config in known if not only or any(part.lower() in config.name.lower() for part in only)
    ]
    if not chosen:
        raise ValueError(
            f"no configuration name contains {' or '.join(only)}; available: "
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
    """Return a row per configuration, scope and tolerance."""
    as_trained = model.spec
    rows = []
    for config in chosen:
        for scope in config.scopes:
            if config.solver.couples_tokens and scope == "prefix":
                continue
            for tolerance in sorted(tolerances, reverse=True):
                calls: list[tuple[int, int]] = []
                with record_calls(model, calls):
                    output, _ = search(model, batch, config, scope, tolerance, max_iterations)
                seconds, wall = [], []
                for _ in range(repeats):
                    began = time.perf_counter()
                    seconds.append(search(model, batch, config, scope, tolerance, max_iterations)[1])
                    wall.append(time.perf_counter() - began)
                solution = output.solution
                rows.append(
                    {
                        "config": config.name,
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
    """Return the solver's state per token, in bytes, as declared by its spec; float32."""
    tokens = 1 if scope == "prefix" else min(length, config.window_length or length)
    return -(-config.solver.state_bytes(tokens * spec.d_model, itemsize=4) // tokens)


# ------------------------------------------------------------------------------------------------- tables


def table(one: dict[str, Any], *, tolerance: float) -> str:
    """Return one model's rows at a tolerance as a text table."""
    rows = [row for row in one["rows"] if row["tolerance"] == tolerance]
    width = max(len(row["config"]) for row in rows)
    lines = [
        f"{one['run']}: {one['sequences']} sequences of {one['length']} tokens, tolerance {tolerance:g}",
        f"{'':<{width}}  {'scope':<8}  {'iterations':>10}  {'maximum':>7}  {'calls':>6}  {'work':>7}  "
        f"{'seconds':>8}  {'converged':>9}  {'error':>8}",
    ]
    for row in rows:
        lines.append(
            f"{row['config']:<{width}}  {row['scope']:<8}  {row['iterations_mean']:10.1f}  "
            f"{row['iterations_max']:7d}  {row['calls']:6d}  {row['work']:7.1f}  {row['seconds']:8.3f}  "
            f"{row['converged']:9.0%}  {row['logit_error']:8.1e}"
        )
    return "\n".join(lines)


def contraction(found: dict[str, Any]) -> str:
    """Return a one-line summary of the spectrum."""
    doubt = (
        f"\nWARNING: only {found['converged']:.0%} of the reference solutions converged; errors and radii of "
        "the others are not those of fixed points"
    )
    return (
        f"spectral radius of the maps of single tokens: median {found['median']:.3f}, largest "
        f"{found['largest']:.3f}, above one {found['above_one']:.0%} of {len(found['radii'])} (eigenvector "
        f"residual at most {found['residual_largest']:.0e})"
    ) + (doubt if found["converged"] < 1.0 else "")


def penalty_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results of further training with each penalty weight as a text table."""
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
