"""CatbAbI: the number of explicit layers that match one implicit layer, task by task.

Movahedi et al., "Fixed-point RNNs", 2025, compare explicit Mamba of 1, 2 and 4 layers with an implicit model.

Shape legend: B rows, L tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from implicit_blocks._utils.devices import choose_device, device_name
from trainer.data.babi import TASKS, CatbAbI
from trainer.experiments.catbabi.plot import MODES, draw
from trainer.experiments.common.checks import reject_option_conflicts, require_counts
from trainer.experiments.common.runs import (
    Finished,
    data_of,
    evaluation_set,
    explicit_twin,
    is_finished,
    load_model,
    run_spec,
    train,
)
from trainer.experiments.common.search import by_token
from trainer.reporting.metrics import rounded
from trainer.reporting.pictures import write_results
from trainer.run.step import autocast
from trainer.specs.run import RunSpec
from trainer.storage.files import read_json, write_json

PUBLISHED = {"Mamba, 1 layer": 0.783, "2 layers": 0.871, "4 layers": 0.865, "FP-Mamba-H": 0.8955}
"""Accuracies on CatbAbI in Movahedi et al., "Fixed-point RNNs"."""
LAPTOP = (
    "model.d_model=64",
    "model.mixer.d_state=16",
    "model.mixer.head_dim=32",
    "training.max_steps=150",
    "training.batch_size=16",
    "training.optimizer.learning_rate=3e-3",
    "phases.0.model.gradient={kind: unrolled, steps: 4}",
    # With two gradient steps and damping 0.5, under 5 % of the tokens converged in 24 iterations, half in
    # 200.
    "model.gradient.steps=4",
    "model.gradient.damping=0.8",
    "model.stopping.max_iterations=12",
    "model.at_evaluation.stopping.max_iterations=100",
)
"""Overrides of the laptop setting, which demonstrates the experiment but does not reproduce its figures."""


SET_BY_OPTIONS = {
    "data.path": "--data",
    "data.scoring": "--scoring",
    "training.seed": "--seeds",
    "model.n_layers": "--models",
}
"""Spec fields that command-line options set."""


class Candidate(NamedTuple):
    """A model in the comparison."""

    kind: str
    layers: int

    @property
    def name(self) -> str:
        """Name such as ``implicit-1``."""
        return f"{self.kind}-{self.layers}"


def run(
    folder: Path,
    data: Path,
    *,
    spec: str = "catbabi",
    laptop: bool = False,
    models: Sequence[str] = ("implicit-1", "explicit-1", "explicit-2", "explicit-4"),
    scoring: Sequence[str] = ("answers", "all"),
    seeds: Sequence[int] = (0,),
    split: str = "valid",
    lengths: Sequence[int] = (),
    sequences: int | None = None,
    device: str = "auto",
    changes: Sequence[str] = (),
    only_finished: bool = False,
) -> str:
    """Train missing runs, score their answers, write ``catbabi.json`` and ``catbabi.png``, return a summary.

    Args:
        folder: output directory, created if missing; runs are stored in its ``runs``.
        data: the archive, or its extracted directory.
        spec: run of the implicit model; the explicit models are its twins.
        laptop: use the small and short setting.
        models: names such as ``implicit-1`` and ``explicit-4``.
        scoring: training losses, ``answers`` or ``all``; one run each.
        seeds: one run each.
        split: split to score, ``valid`` or ``test``.
        lengths: tokens per scored row; by default the training length. Longer rows cut fewer stories in two,
            like a state carried over from row to row.
        sequences: number of rows of the split; None: all.
        device: name of the device.
        changes: overrides of the spec.
        only_finished: train nothing; combine finished runs.

    Raises:
        ValueError: an unknown model, an incomplete archive, or invalid settings.

    """
    wanted = [_candidate(name) for name in models]
    require_counts(sequences=sequences)
    for length in lengths:
        require_counts(length=length)
    reject_option_conflicts(changes, SET_BY_OPTIONS)
    if (kind := run_spec(spec).data.kind) != "catbabi":
        raise ValueError(f"the data of {spec} are of kind {kind!r}; use a run on catbabi")
    place = choose_device(device)
    common = [*(LAPTOP if laptop else ()), f"data.path={data}", *changes]
    plan = [
        (
            candidate,
            mode,
            seed,
            _spec(spec, candidate, [*common, f"data.scoring={mode}", f"training.seed={seed}"]),
        )
        for mode in scoring
        for seed in seeds
        for candidate in wanted
    ]
    sources, stand_ins = _sources(plan[0][3], split, lengths)
    rows = []
    for candidate, mode, seed, run in plan:
        name = f"{candidate.name}-{mode}-{seed}"
        if only_finished and not is_finished(folder / "runs" / name):
            continue
        finished = train(run, folder / "runs" / name, name=name, device=device)
        for length, source in sources.items():
            count = min(sequences or source.samples, source.samples)
            answers = _answers(finished, source, split=split, rows=count, device=place)
            rows.append(_row(candidate, mode, seed, length, finished, answers))
    if not rows:
        raise ValueError(f"{folder} contains none of these runs finished; omit --only-finished to train them")
    written = {
        "experiment": "catbabi",
        "spec": spec,
        "setting": "laptop" if laptop else "full",
        "changes": list(changes),
        "split": split,
        "answers": rows[0]["answers"],
        "stand_ins": dict(stand_ins),
        "device": device_name(place),
        "published": PUBLISHED,
        "models": rows,
    }
    where = write_results(folder, "catbabi", written, draw)
    messages = [
        f"{name} is missing: replaced by {count} stories of the set en" for name, count in stand_ins.items()
    ]
    return "\n".join([table(rows), *messages, where])


def _candidate(name: str) -> Candidate:
    found = re.fullmatch(r"(implicit|explicit)-([1-9]\d*)", name)
    if found is None:
        raise ValueError(
            f"{name!r} is not a model; give its kind and layers, such as implicit-1 or explicit-4"
        )
    return Candidate(found[1], int(found[2]))


def _spec(spec: str, candidate: Candidate, changes: Sequence[str]) -> RunSpec:
    run = run_spec(spec, [*changes, f"model.n_layers={candidate.layers}"])
    if candidate.kind == "explicit":
        # A twin ignores the phases' search settings, but reads the same data.
        phases = tuple(phase.model_copy(update={"model": {}}) for phase in run.phases)
        read_alike = not any(phase.data or phase.training for phase in phases)
        run = explicit_twin(spec, changes, n_layers=candidate.layers)
        run = run if read_alike else run.model_copy(update={"phases": phases})
    # All answers are scored at the end; evaluations during training use a few rows.
    few = run.evaluation.model_copy(update={"sequences": min(32, run.evaluation.sequences)})
    return run.model_copy(update={"evaluation": few})


def _sources(
    spec: RunSpec, split: str, lengths: Sequence[int]
) -> tuple[dict[int, CatbAbI], Mapping[str, int]]:
    """Return the split's scored rows by length (`lengths`, or the spec's), and the replaced files."""
    data = data_of(spec.model_copy(update={"data": spec.data.model_copy(update={"held_out": split})}))
    assert isinstance(data, CatbAbI)
    found = {}
    for length in lengths or (spec.data.seq_len,):
        source = evaluation_set(spec, data, length).source
        assert isinstance(source, CatbAbI)
        found[length] = source
    return found, data.stand_ins


def _answers(
    finished: Finished, source: CatbAbI, *, split: str, rows: int, device: torch.device
) -> dict[str, Any]:
    """Return the counts per task and the search statistics, cached in the run's directory."""
    steps = finished.summary["steps"]  # of a run that may be extended
    path = finished.folder / f"answers-{split}-{source.length}-{rows}-{steps}.json"
    if path.is_file():
        kept: dict[str, Any] = read_json(path)
        return kept
    found = score_answers(
        load_model(finished, device),
        source,
        rows=rows,
        batch_size=max(1, finished.spec.evaluation.batch_size * finished.spec.data.seq_len // source.length),
        device=device,
        precision=finished.spec.training.precision,
    )
    write_json(path, found)
    return found


@torch.no_grad()
def score_answers(
    model: nn.Module, source: CatbAbI, *, rows: int, batch_size: int, device: torch.device, precision: str
) -> dict[str, Any]:
    """Count a model's correct answers per task, with search statistics (None for an explicit model)."""
    correct, scored = torch.zeros(max(TASKS) + 1), torch.zeros(max(TASKS) + 1)
    iterations, residuals, converged = [], [], []
    for first in range(0, rows, batch_size):
        count = min(batch_size, rows - first)
        batch = source.batch(first, count).to(device)
        tasks_BL = source.tasks(first, count)
        with autocast(device, precision):
            output = model(batch.inputs, labels=batch.labels, return_logits=False)
        right_BL = (output.predictions == batch.labels).cpu()
        scored += torch.bincount(tasks_BL.flatten(), minlength=len(scored))
        correct += torch.bincount(tasks_BL[right_BL], minlength=len(scored))
        if output.solution is not None:
            found, flags = by_token(output.solution, source.length)
            iterations.append(found.double().flatten())
            residuals.append(output.solution.residual.double().cpu())
            converged.append(flags.double().flatten())
    search = None
    if iterations:
        search = {
            "iterations": rounded(float(torch.cat(iterations).mean()), 4),
            "iterations_max": int(torch.cat(iterations).max()),
            "residual": rounded(float(torch.cat(residuals).mean()), 4),
            "residual_max": rounded(float(torch.cat(residuals).max()), 4),
            "converged": rounded(float(torch.cat(converged).mean()), 6),
        }
    return {"correct": _counts(correct), "scored": _counts(scored), "search": search}


def _counts(by_task: Tensor) -> dict[str, int]:
    return {str(task): int(by_task[task]) for task in TASKS}


def _row(
    candidate: Candidate, mode: str, seed: int, length: int, finished: Finished, answers: Mapping[str, Any]
) -> dict[str, Any]:
    right, all_of = answers["correct"], answers["scored"]
    by_task = {
        task: rounded(right[task] / all_of[task]) if all_of[task] else None for task in map(str, TASKS)
    }
    known = [value for value in by_task.values() if value is not None]
    summary = finished.summary
    return {
        "model": candidate.name,
        "scoring": mode,
        "seed": seed,
        "length": length,
        "parameters": summary["parameters"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "accuracy": rounded(sum(right.values()) / max(1, sum(all_of.values()))),
        "mean_of_tasks": rounded(sum(known) / max(1, len(known))),
        "answers": sum(all_of.values()),
        "search": answers["search"],
        "by_task": by_task,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return accuracies per task, one column per model, with means and search statistics."""
    heads = [
        f"{row['model']} {MODES[row['scoring']].split()[0]} {row['seed']} L{row['length']}" for row in rows
    ]
    width = max(map(len, heads))
    lines = ["task     " + "  ".join(head.rjust(width) for head in heads)]

    def line(name: str, values: Sequence[float | None], form: str = ".2%") -> str:
        cells = ("-" if value is None else format(value, form) for value in values)
        return f"{name:<9}" + "  ".join(cell.rjust(width) for cell in cells)

    lines += [line(f"qa{task}", [row["by_task"][str(task)] for row in rows]) for task in TASKS]
    lines += [line(key.split("_")[0], [row[key] for row in rows]) for key in ("mean_of_tasks", "accuracy")]
    for key, form in (("iterations", ".1f"), ("residual", ".1e"), ("converged", ".1%")):
        lines.append(line(key, [row["search"] and row["search"][key] for row in rows], form))
    return "\n".join(lines)
