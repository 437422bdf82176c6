"""What a finished run leaves for people and programs to read: ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from trainer.checkpoint.load import SaveTimes, TrainingProgress
from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.metrics import json_value
from trainer.reporting.throughput import by_phase
from trainer.specs.run import RunSpec, WordProblemSpec
from trainer.storage.run_folder import differences


def summarize(
    *,
    name: str,
    spec: RunSpec,
    model: nn.Module,
    progress: TrainingProgress,
    last_row: Mapping[str, Any],
    results: Sequence[EvaluationResult],
    manifest: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]] = (),
    stopped: str | None = None,
    saves: Sequence[SaveTimes] = (),
    stall_seconds: float = 0.0,
) -> dict[str, Any]:
    """Return the summary of a finished run as JSON values; ``seconds`` is its wall time, resumes included.

    ``rows`` are the run's metrics, summed up by phase. ``stopped`` is why a callback ended it before its last
    step. ``saves`` and the ``stall_seconds`` for which they held up training are since the last start.
    """
    measured = by_phase(rows)
    summary = {
        "name": name,
        "task": spec.data.kind,
        "model": spec.model.kind,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": progress.step,
        "stopped": stopped,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "skipped": progress.skipped,
        "seconds": round(progress.seconds, 1),
        "seed": spec.training.seed,
        "training_length": spec.data.seq_len,
        "last_tokens": spec.evaluation.last_tokens,
        "chance": _chance(spec),
        "phases": [
            {
                "name": phase.name,
                "first_step": phase.first_step,
                "last_step": phase.last_step,
                "measured": measured.get(phase.name),
                "changes": differences(
                    {
                        "model": spec.model.model_dump(mode="json"),
                        "training": spec.training.model_dump(mode="json"),
                        "data": spec.data.model_dump(mode="json"),
                    },
                    {
                        "model": phase.model.model_dump(mode="json"),
                        "training": phase.training.model_dump(mode="json"),
                        "data": phase.data.model_dump(mode="json"),
                    },
                ),
            }
            for phase in spec.phase_specs()
        ],
        "saving": {
            "checkpoints": len(saves),
            "gb": max((save.size for save in saves), default=0) / 1e9,
            "stall_seconds": round(stall_seconds, 4),
            "staging_seconds": [round(save.staging_seconds, 4) for save in saves],
            "seconds": [round(save.seconds, 3) for save in saves],
        },
        "final": dict(last_row),
        "evaluation": [result.as_row(by_position=True) for result in results],
        "device": manifest["device"],
        "threads": manifest["threads"],
        "versions": manifest["versions"],
        "command": manifest["command"],
    }
    value: dict[str, Any] = json_value(summary)
    return value


def _chance(spec: RunSpec) -> float | None:
    """Return the accuracy of guessing, where every answer is equally likely: a group without a monoid."""
    if isinstance(spec.data, WordProblemSpec) and spec.data.monoid is None:
        return 1.0 / spec.data.vocab_size
    return None
