"""The summary of a finished run, ``summary.json``, and measurements summed up by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from torch import nn

from trainer.checkpoint.folder import TrainingProgress
from trainer.checkpoint.writer import SaveTimes
from trainer.distributed.tensor_parts import parameter_count
from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.display import counted, duration, magnitude
from trainer.reporting.metrics import json_value, rounded
from trainer.run.step import PERCENTILES
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
    """Return the summary of a finished run as JSON values; ``seconds`` is its wall time over all starts.

    Args:
        name: of the run.
        spec: of the run.
        model: the trained model.
        progress: of the run at its end.
        last_row: metrics of the last step.
        results: of the final evaluation.
        manifest: of this start of the run.
        rows: metrics of all steps, summed up by phase.
        stopped: why a callback ended the run before its last step; None: it did not.
        saves: checkpoints saved since this start.
        stall_seconds: for which those saves stalled training.

    """
    measured = by_phase(rows)
    summary = {
        "name": name,
        "task": spec.data.kind,
        "model": spec.model.kind,
        "parameters": parameter_count(model),
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
    """Return the accuracy of random guessing if all answers are equally likely (a group), else None."""
    if isinstance(spec.data, WordProblemSpec) and spec.data.monoid is None:
        return 1.0 / spec.data.vocab_size
    return None


_AVERAGED = (
    "iterations",
    "iterations_p50",
    "iterations_p90",
    "iterations_p99",
    "residual",
    "residual_p50",
    "residual_p90",
    "residual_p99",
    "non_converged",
    "diverged",
    "gradient_norm",
    "tflops",
    "tflops_executed",
    "mfu",
    "hfu",
)
_LARGEST = ("iterations_max", "residual_max", "memory_gb", "memory_allocated_gb")

REQUIRED = ("phase", "loss", "step_seconds", "tokens_per_second")
"""Columns that :func:`by_phase` requires in every row."""
NUMBERS = (*_AVERAGED, *_LARGEST, *REQUIRED[1:], "tokens", "save_stall_seconds")
"""Columns that :func:`by_phase` computes with."""


def by_phase(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sum up the metrics of each phase, in order, without keeping the rows in memory.

    Averages are over steps, ``tokens_per_second`` is over time. Quantities that no row of a phase has are
    None.
    """
    phases: dict[str, _PhaseSums] = {}
    for before, row in pairwise(chain([{"step": 0, "tokens": 0}], rows)):
        phases.setdefault(row["phase"], _PhaseSums()).add(row, tokens=_tokens(row, before))
    return {name: sums.summary() for name, sums in phases.items()}


def _tokens(row: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """Return the tokens of a step: exact if ``before`` is the row of the previous step."""
    if row["step"] == before["step"] + 1 and None not in (row.get("tokens"), before.get("tokens")):
        return float(row["tokens"] - before["tokens"])
    return (row["tokens_per_second"] or 0.0) * (row["step_seconds"] or 0.0)  # both are rounded


class _PhaseSums:
    """Running sums over the rows of a phase."""

    def __init__(self) -> None:
        self._steps = self._skipped = 0
        self._seconds = self._tokens = self._stalled = 0.0
        self._losses: tuple[float | None, float | None] = None, None
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._largest: dict[str, float] = {}

    def add(self, row: Mapping[str, Any], *, tokens: float) -> None:
        """Add the row of a step of ``tokens`` tokens."""
        self._losses = row["loss"] if self._steps == 0 else self._losses[0], row["loss"]
        self._steps += 1
        self._skipped += row.get("skipped") is not None
        self._seconds += row["step_seconds"] or 0.0
        self._tokens += tokens
        self._stalled += row.get("save_stall_seconds") or 0.0  # absent in files of older versions
        for key in _AVERAGED:
            if (value := row.get(key)) is not None:
                self._sums[key] = self._sums.get(key, 0.0) + value
                self._counts[key] = self._counts.get(key, 0) + 1
        for key in _LARGEST:
            if (value := row.get(key)) is not None:
                self._largest[key] = max(value, self._largest.get(key, value))

    def summary(self) -> dict[str, Any]:
        """Return the sums, averages and maxima."""
        rate = round(self._tokens / self._seconds, 1) if self._seconds > 0 else None
        return {
            "steps": self._steps,
            "seconds": round(self._seconds, 2),
            "tokens": round(self._tokens),
            "tokens_per_second": rate,
            "loss_first": self._losses[0],
            "loss_last": self._losses[1],
            "skipped": self._skipped,
            "save_stall_seconds": round(self._stalled, 3),
            **{
                key: rounded(self._sums[key] / self._counts[key]) if key in self._sums else None
                for key in _AVERAGED
            },
            **{key: self._largest.get(key) for key in _LARGEST},
        }


def in_words(name: str, measured: Mapping[str, Any]) -> str:
    """Return the measurements of a phase, from :func:`by_phase`, as one line of text."""
    parts = [f"phase {name}: {counted(measured['steps'], 'step')} in {duration(measured['seconds'])}"]
    if measured["tokens_per_second"] is not None:
        parts.append(f"{magnitude(measured['tokens_per_second'])} tok/s")
    if measured["mfu"] is not None:
        parts.append(f"mfu {measured['mfu']:.1%} (executed {measured['hfu']:.1%})")
    if measured["memory_gb"] is not None:
        parts.append(f"{measured['memory_gb']:.1f} GB")
    if measured["iterations"] is not None:
        parts.append(f"iter {measured['iterations']:.1f}, at most {measured['iterations_max']}")
    if measured["residual_p50"] is not None:
        percentiles = ", ".join(f"{measured[f'residual_p{percent}']:.1e}" for percent in PERCENTILES)
        parts.append(f"res p{'/'.join(map(str, PERCENTILES))} {percentiles}")
    if measured["non_converged"] is not None:
        parts.append(f"unconverged {measured['non_converged']:.1%}")
    if measured["gradient_norm"] is not None:
        parts.append(f"|g| {measured['gradient_norm']:.2f}")
    if measured["skipped"]:
        parts.append(f"{measured['skipped']} skipped")
    return "  ".join(parts)
