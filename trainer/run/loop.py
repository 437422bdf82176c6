"""The training loop: steps, phases, evaluations, checkpoints, and the end of a run."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trainer.callbacks import CallbackDispatcher, Callbacks
from trainer.checkpoint.folder import TrainingProgress
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import Layout
from trainer.errors import CallbackError, NonFiniteLossError
from trainer.evaluation.evaluate import EvaluationResult
from trainer.optim.ema import WeightAverage
from trainer.optim.schedules import Schedule
from trainer.reporting.backends import BackendRecord
from trainer.reporting.display import Display
from trainer.reporting.recorder import StepRecorder
from trainer.run.evaluating import Evaluator
from trainer.run.interrupt import Interrupt
from trainer.run.look_ahead import LookAhead, Turns
from trainer.run.phases import ActivePhase
from trainer.run.step import MadeStep, StepResult, set_learning_rate, training_step
from trainer.specs.run import Phase, RunSpec
from trainer.storage.run_folder import RunFolder


@dataclass(eq=False, repr=False)
class EagerSteps:
    """Makes the steps of a run, one after another."""

    layout: Layout
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    active: ActivePhase
    average: WeightAverage | None
    spec: RunSpec
    in_flight = 0
    """Number of steps that are launched and have not been returned."""

    def enter_phase(self) -> None:
        """Prepare the steps of the active phase."""

    def make(self, step: int, first: int, *, until: int) -> MadeStep:
        """Make ``step``, whose batch begins at sample ``first``.

        ``until`` is the end of the steps that may be launched ahead of their results; there are none here.

        Raises:
            DataError: the data of the step cannot be used.

        """
        training = self.active.phase.training
        began = time.perf_counter()
        rate = self.schedule.rate(step, peak=training.optimizer.learning_rate)
        set_learning_rate(self.optimizer, rate)
        batch = self.active.batch(step, first)
        result = training_step(
            self.layout,
            self.optimizer,
            batch,
            precision=training.precision,
            micro_batch_size=training.micro_batch_size,
            max_grad_norm=training.max_grad_norm,
            last_tokens=self.spec.evaluation.last_tokens,
            place=f"step {step + 1} (samples {first} to {first + training.batch_size - 1})",
        )
        seconds = time.perf_counter() - began
        if self.average is not None and result.not_finite is None:
            self.average.update(step + 1)
        tokens = batch.tokens * self.layout.grid.batches.world_size  # the shares are equal
        return MadeStep(result, rate, tokens, seconds)


@dataclass(kw_only=True, eq=False, repr=False)
class Loop:
    """Trains a model from ``progress`` to the end of the run, or to the step at which it is stopped.

    The loop builds nothing and reads no spec files: :mod:`trainer.run.build` gives it all components.
    """

    spec: RunSpec
    layout: Layout
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    folder: RunFolder
    display: Display
    callbacks: Callbacks
    dispatcher: CallbackDispatcher
    active: ActivePhase
    evaluator: Evaluator
    recorder: StepRecorder
    checkpoints: CheckpointManager
    backends: BackendRecord
    progress: TrainingProgress
    """Where the run starts, and how far it has come."""
    average: WeightAverage | None = None
    """The average of the weights, which evaluations and exports use."""
    turns: Turns | None = field(default=None, init=False)
    """The turns of a run that shares its process with others, see :meth:`share_process`."""
    stopped_by: int | None = field(default=None, init=False)
    """The signal that ended the run, or None."""

    def __post_init__(self) -> None:
        self.ranks = self.layout.ranks
        self.total_steps = self.spec.total_steps
        self._interrupt, self._end = Interrupt(), self.total_steps
        self._steps: EagerSteps | LookAhead = EagerSteps(
            self.layout, self.optimizer, self.schedule, self.active, self.average, self.spec
        )
        self._began = time.perf_counter() - self.progress.seconds

    def share_process(self, turns: Turns) -> None:
        """Train in turns with other runs of this process, whose main thread receives the signals.

        Where steps can be captured as CUDA graphs, they are, and are launched ahead of their results.
        """
        assert isinstance(self._steps, EagerSteps)
        self.turns, self._steps = turns, LookAhead(self._steps, display=self.display, turns=turns)

    def run(self, *, stop_at: int | None = None) -> list[EvaluationResult] | None:
        """Train to the end and evaluate; return the results, or None if the run was stopped before its end.

        A run that is stopped by ``stop_at`` (a step) or by a signal has saved a checkpoint. If a signal
        interrupts an evaluation, the resumed run repeats it. A run that a callback stops is finished early:
        saved and evaluated.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite; the last checkpoint is intact.
            DataError: the data of a step cannot be used; the last checkpoint is intact.
            CallbackError: a required callback failed; a checkpoint has been saved.
            FailedSaveError: a checkpoint cannot be written, and ``training.on_failed_save`` is ``stop``.
            FailedRecordError: the metrics cannot be written, likewise.
            LostPeerError: another process ended during a save.

        """
        self._end = self.total_steps if stop_at is None else min(stop_at, self.total_steps)
        self._began = time.perf_counter() - self.progress.seconds
        self.display.start(step=self.progress.step, total=self.total_steps)
        try:
            finished, results = False, None
            with Interrupt() if self.turns is None else nullcontext(self.turns.interrupt) as self._interrupt:
                self._notify("on_start", checkpoint=self.checkpoints.last_checkpoint)
                if self._evaluation_is_missing():
                    self._enter_phase(self.progress.step - 1)
                    self._evaluate()
                while self._has_next_step():
                    self._one_step()
                    self.checkpoints.poll()
                self._save()
                self.checkpoints.poll(wait=True)
                self.dispatcher.raise_failure()
                self.recorder.require_written(self.progress.step)
                if self.progress.step >= self.total_steps or self.callbacks.stop_reason is not None:
                    # A run that is resumed at its end has not entered its last phase yet.
                    self._enter_phase(max(0, self.progress.step - 1))
                    # A callback may have stopped the run because of an evaluation of this step.
                    results = self.evaluator.last_results(self.progress.step) or self._evaluate()
                    finished = results is not None
            if finished and self.spec.training.export_every is not None:
                self._export()
            self._notify("on_end", finished=finished)
            self.dispatcher.raise_failure()
            return results
        except CallbackError:
            self._save()
            raise
        finally:
            self.checkpoints.end()
            self.active.close()
            self.display.close()
            self.folder.metrics.close()
            self.folder.evaluations.close()

    def _has_next_step(self) -> bool:
        """Whether there is another step; a run that must stop ends with the steps that are launched."""
        if self.progress.step < self._end and self._must_stop():
            self._end = self.progress.step + self._steps.in_flight
        return self.progress.step < self._end

    def _one_step(self) -> None:
        entered = self._enter_phase(self.progress.step)
        phase = self.active.phase
        training, first = phase.training, self.progress.samples
        result, rate, tokens, seconds = self._steps.make(self.progress.step, first, until=self._end)
        skipped = result.not_finite is not None
        if skipped:
            self._skip(_not_finite(result, phase=phase, progress=self.progress))
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            phase=phase.name,
            samples=first + training.batch_size,
            tokens=self.progress.tokens + tokens,
            seconds=self._seconds(),
            skipped=self.progress.skipped + skipped,
            skipped_in_a_row=self.progress.skipped_in_a_row + 1 if skipped else 0,
        )
        self.recorder.record(
            result,
            progress=self.progress,
            learning_rate=rate,
            epochs=self.active.epochs(self.progress.step, self.progress.samples),
            tokens=tokens,
            step_seconds=seconds,
            stall_seconds=self.checkpoints.take_stall(),
        )
        self.dispatcher.notify("on_step", row=self.recorder.last_row)
        if entered:
            self.backends.update()
        if self._is_due(training.evaluate_every) and self.progress.step < self.total_steps:
            self._evaluate()
        if self._is_due(training.checkpoint_every):
            self._save()
        if self._is_due(training.export_every) and self.progress.step < self.total_steps:
            self._export()

    def _enter_phase(self, step: int) -> bool:
        """Activate the phase of ``step``, counted from 0; return whether it was not active before."""
        entered = self.active.enter(step)
        if entered:
            self.recorder.enter_phase(self.active.phase, self.layout.model)
            self._steps.enter_phase()
            self.dispatcher.notify("on_phase", step=step, phase=self.active.phase)
        return entered

    def _skip(self, error: NonFiniteLossError) -> None:
        """Log that a batch made no update, or raise; all ranks have the same error."""
        training = self.spec.training
        if training.non_finite == "stop" or error.skipped_before >= training.max_consecutive_skips:
            raise error
        self.display.log(f"WARNING: {error.what}; the batch is skipped ({self.progress.skipped + 1} so far)")

    def _must_stop(self) -> bool:
        """Whether a signal, a callback, or a failure on any rank ends the run; the same on all ranks."""
        own = (
            self._interrupt.received or 0,
            self.callbacks.stop_reason is not None,
            self.dispatcher.failed,
            self.checkpoints.must_stop or self.recorder.must_stop,
        )
        by_signal, by_callback, failed, not_saved = self.ranks.max(list(map(float, own)))
        if by_signal:
            self.stopped_by = int(by_signal)
        if by_callback and self.callbacks.stop_reason is None:
            self.callbacks.stop("a callback of another process requested it")
        return bool(by_signal or by_callback or failed or not_saved)

    def _interrupted(self) -> bool:
        """Whether any rank received a signal; the same on all ranks. Called between batches."""
        if self.turns is not None:
            self.turns.pause()
        self.stopped_by = int(self.ranks.max([self._interrupt.received or 0])[0]) or None
        return self.stopped_by is not None

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _evaluation_is_missing(self) -> bool:
        """Whether the run was stopped during an evaluation: its step has a checkpoint but no result."""
        step = self.progress.step
        due = self._is_due(self.spec.training.evaluate_every) and 0 < step < self.total_steps
        return due and self.evaluator.is_missing(step)

    def _evaluate(self) -> list[EvaluationResult] | None:
        results = self.evaluator.evaluate(
            step=self.progress.step, phase=self.progress.phase, interrupted=self._interrupted
        )
        self.backends.update()
        if results is not None:
            self.progress = replace(self.progress, seconds=self._seconds())
        return results

    def _save(self) -> None:
        self.backends.update()
        self.checkpoints.save(self.progress, seconds=self._seconds)

    def _export(self) -> None:
        self.checkpoints.export(
            self.active.model_spec, step=self.progress.step, length=self.spec.data.seq_len
        )

    def _notify(self, event: str, **details: object) -> None:
        self.dispatcher.notify(event, step=self.progress.step, **details)

    def _seconds(self) -> float:
        """Return the training time of the run, earlier starts included."""
        return time.perf_counter() - self._began

    @property
    def unsaved(self) -> bool:
        """Whether the latest weights are in no checkpoint, as when a save failed and the run continued."""
        return self.progress.step not in (0, self.checkpoints.saved_step)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that this loop wrote or started from."""
        return self.checkpoints.last_checkpoint


def _not_finite(result: StepResult, *, phase: Phase, progress: TrainingProgress) -> NonFiniteLossError:
    """Return the error for a step with a NaN or infinite loss or gradient, after ``progress``."""
    quantity, first = result.not_finite, progress.samples
    assert quantity is not None
    return NonFiniteLossError(
        step=progress.step + 1,
        phase=phase.name,
        quantity=quantity,
        value=result.loss if quantity == "loss" else result.gradient_norm,
        samples=(first, first + phase.training.batch_size),
        skipped_before=progress.skipped_in_a_row,
    )
