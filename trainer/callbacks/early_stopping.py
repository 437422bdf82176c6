"""The callback ``early_stopping``: ends a run whose evaluations have stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from implicit_blocks._utils.hints import did_you_mean
from trainer.callbacks.base import Callback, CallbackContext
from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.display import counted
from trainer.reporting.metrics import grows_to_improve, read_metrics
from trainer.specs.callbacks import EarlyStoppingSpec


class EarlyStopping(Callback):
    """Ends the run after ``patience`` evaluations in which a metric has not improved by ``min_delta``.

    A resumed run counts the evaluations of its earlier starts too, which it reads from
    ``evaluations.jsonl``. A value that is None or not finite is no improvement. Rank 0 decides.
    """

    def __init__(self, spec: EarlyStoppingSpec) -> None:
        self._spec = spec
        self._sign = 1.0 if grows_to_improve(spec.metric) else -1.0
        self._begin()

    def _begin(self) -> None:
        self._best: float | None = None
        self._best_step = self._last_step = -1
        self._failed = 0

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Count the evaluations of a resumed run, which stays ended if its patience is exhausted."""
        self._begin()
        path = run.folder / "evaluations.jsonl"
        if not run.is_main or not path.is_file():
            return
        rows: dict[int, list[dict[str, Any]]] = {}
        for row in read_metrics(path, damaged=lambda _: None):
            if row["step"] <= step:
                rows.setdefault(row["step"], []).append(row)
        for at, every in sorted(rows.items()):
            self._count(at, self._value(every))
        self._stop_if_exhausted(run, step)

    def on_evaluation(self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]) -> None:
        """Compare an evaluation with the best one; stop the run if its patience is exhausted."""
        if not run.is_main or step <= self._last_step:  # a run resumed at its end is evaluated again
            return
        self._count(step, self._value([result.as_row(by_position=False) for result in results]))
        self._stop_if_exhausted(run, step)

    def _stop_if_exhausted(self, run: CallbackContext, step: int) -> None:
        spec = self._spec
        if self._failed < spec.patience or step >= run.spec.total_steps:
            return
        best = "was never finite" if self._best is None else f"was {self._best:g} at step {self._best_step}"
        run.stop(
            f"{spec.metric} has not improved by {spec.min_delta:g} in "
            f"{counted(self._failed, 'evaluation')}; its best value {best}"
        )

    def _count(self, step: int, value: float | None) -> None:
        self._last_step = step
        improved = value is not None and (
            self._best is None or self._sign * (value - self._best) > self._spec.min_delta
        )
        if improved:
            self._best, self._best_step, self._failed = value, step, 0
        else:
            self._failed += 1

    def _value(self, rows: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the metric in the rows of an evaluation; None if it is not finite."""
        spec = self._spec
        if not rows:
            raise ValueError("there are no evaluation sets; add validation data, or remove early_stopping")
        names = [str(row["set"]) for row in rows]
        if spec.set is not None and spec.set not in names:
            raise ValueError(f"there is no evaluation set {spec.set!r}; {did_you_mean(spec.set, names)}")
        row = rows[0 if spec.set is None else names.index(spec.set)]
        if spec.metric not in row:
            raise ValueError(
                f"the evaluations have no metric {spec.metric!r}; {did_you_mean(spec.metric, row)}"
            )
        value = row[spec.metric]
        return value if isinstance(value, int | float) and math.isfinite(value) else None
