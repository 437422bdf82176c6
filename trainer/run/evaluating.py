"""Evaluation in the middle and at the end of a run: its results are written, shown and reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.data.source import EvaluationSet
from trainer.distributed import Layout
from trainer.evaluation.evaluate import EvaluationResult, EvaluationStopped, evaluate, table
from trainer.reporting.display import Display
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder


class Evaluator:
    """Evaluates the model of a run on its evaluation sets. Every rank calls it; rank 0 writes.

    Args:
        spec: of the run.
        layout: the model over the ranks.
        sets: to evaluate on, by name.
        folder: of the run.
        display: shows the results.

    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        layout: Layout,
        sets: Mapping[str, EvaluationSet],
        folder: RunFolder,
        display: Display,
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._ranks = layout.ranks
        self._folder = folder
        self._display = display
        self.sets = sets

    def is_missing(self, step: int) -> bool:
        """Whether the folder has no evaluation of ``step``, as after an interrupted evaluation."""

        def missing() -> bool:
            last = self._folder.evaluations.last_row()
            return last is None or last["step"] < step

        return self._ranks.run_on_rank0(missing)

    def evaluate(
        self, *, step: int, phase: str, interrupted: Callable[[], bool]
    ) -> list[EvaluationResult] | None:
        """Evaluate the model after ``step``; write and show the results.

        Returns None if ``interrupted``, which is called before every batch, stopped the evaluation.
        """
        evaluation = self._spec.evaluation
        try:
            with self._layout.gathered():
                results = evaluate(
                    self._layout.model,
                    self.sets.values(),
                    device=self._ranks.device,
                    precision=self._spec.training.precision,
                    batch_size=evaluation.batch_size,
                    last_tokens=evaluation.last_tokens,
                    window_length=evaluation.window_length,
                    announce=self._display.doing,
                    ranks=self._ranks,
                    equal_calls=self._layout.communicates_in_the_loop,
                    stop=interrupted,
                )
        except EvaluationStopped:
            self._display.log(f"the evaluation after step {step} was interrupted by a signal")
            return None
        if self._ranks.is_main:
            place = {"step": step, "phase": phase}
            # One write: a killed process leaves the rows of all sets, or none.
            self._folder.evaluations.write(*({**place, **each.as_row(by_position=False)} for each in results))
        if results:
            has_answers = self._spec.data.task is not None
            shown = table(results, last_tokens=evaluation.last_tokens, words=has_answers)
            self._display.log(f"evaluation after step {step}\n{shown}")
        return results
