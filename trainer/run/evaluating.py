"""Evaluation in the middle and at the end of a run: its results are written, shown and reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.data.source import EvaluationSet
from trainer.distributed import Layout
from trainer.evaluation.evaluate import EvaluationResult, EvaluationStopped, evaluate, table
from trainer.optim.ema import WeightAverage, averaged
from trainer.reporting.display import Display
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder


class Evaluator:
    """Evaluates the model of a run on its evaluation sets. Every rank calls it; rank 0 writes.

    Args:
        spec: of the run.
        layout: the model over the ranks.
        sets: to evaluate on, by name.
        average: of the model's weights; evaluated in their place.
        folder: of the run.
        display: shows the results.
        notify: notifies the callbacks of an event.

    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        layout: Layout,
        sets: Mapping[str, EvaluationSet],
        average: WeightAverage | None,
        folder: RunFolder,
        display: Display,
        notify: Callable[..., None],
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._ranks = layout.ranks
        self._folder = folder
        self._display = display
        self._average = average
        self._notify = notify
        self.sets = sets
        self._last: tuple[int, list[EvaluationResult]] | None = None

    def is_missing(self, step: int) -> bool:
        """Whether the folder has no evaluation of ``step``, as after an interrupted evaluation."""
        last = self._ranks.run_on_rank0(self._folder.evaluations.last_row) or {"step": 0}
        return bool(last["step"] < step)

    def last_results(self, step: int) -> list[EvaluationResult] | None:
        """Return the results of the last evaluation if it was that after ``step``, else None."""
        return self._last[1] if self._last is not None and self._last[0] == step else None

    def evaluate(
        self, *, step: int, phase: str, interrupted: Callable[[], bool]
    ) -> list[EvaluationResult] | None:
        """Evaluate the model after ``step``; write and show the results and notify the callbacks.

        The model has its averaged weights meanwhile, if the run has an average. Returns None if
        ``interrupted``, which is called before every batch, stopped the evaluation.
        """
        with averaged(self._average):
            results = self._evaluate(step, interrupted)
            if results is not None:
                self._report(results, step=step, phase=phase)
                self._last = step, results
                self._notify("on_evaluation", step=step, results=results)
        return results

    def _evaluate(self, step: int, interrupted: Callable[[], bool]) -> list[EvaluationResult] | None:
        evaluation = self._spec.evaluation
        try:
            with self._layout.gathered():
                return evaluate(
                    self._layout.model,
                    self.sets.values(),
                    device=self._ranks.device,
                    precision=self._spec.training.precision,
                    batch_size=evaluation.batch_size,
                    last_tokens=evaluation.last_tokens,
                    window_length=evaluation.window_length,
                    announce=self._display.doing,
                    ranks=self._layout.grid.data,  # ranks that divide heads evaluate the same sequences
                    equal_calls=self._layout.communicates_in_the_loop,
                    stop=interrupted,
                )
        except EvaluationStopped:
            self._display.log(f"the evaluation after step {step} was interrupted by a signal")
            return None

    def _report(self, results: list[EvaluationResult], *, step: int, phase: str) -> None:
        """Write and show the results."""
        place: dict[str, Any] = {"step": step, "phase": phase}
        if self._average is not None:
            place["weights"] = self._average.weights
        if self._ranks.is_main:
            if (self._folder.evaluations.last_row() or place)["step"] == step:  # of an earlier start
                self._folder.evaluations.truncate_after(step - 1)
            # One write: a killed process leaves the rows of all sets, or none.
            self._folder.evaluations.write(*({**place, **each.as_row(by_position=False)} for each in results))
        if results:
            has_answers = self._spec.data.task is not None
            shown = table(results, last_tokens=self._spec.evaluation.last_tokens, words=has_answers)
            of_average = ", averaged weights" if place.get("weights") == "average" else ""
            self._display.log(f"evaluation after step {step}{of_average}\n{shown}")
