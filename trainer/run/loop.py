"""The training loop: steps, phases, evaluations, checkpoints, and what is left behind at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from implicit_blocks.search.convergence_watch import adjoint_watch, expects_convergence, search_watch
from implicit_blocks.specs import ModelSpec
from trainer.callbacks import CallbackContext, Callbacks
from trainer.callbacks.dispatch import CallbackDispatcher
from trainer.checkpoint.load import Checkpointer, TrainingProgress
from trainer.checkpoint.manager import CheckpointManager
from trainer.data.prefetch import Prefetcher
from trainer.data.source import DataSource, EvaluationSet, rank_share
from trainer.distributed import Layout
from trainer.errors import CallbackError, DataError, NonFiniteLossError
from trainer.evaluation.evaluate import (
    EvaluationResult,
    EvaluationStopped,
    adjoint_row,
    evaluate,
    search_row,
    table,
)
from trainer.optim.optimizers import set_learning_rate
from trainer.optim.schedules import Schedule
from trainer.reporting.backends import BackendRecord
from trainer.reporting.display import Display
from trainer.reporting.metrics import epoch_row
from trainer.reporting.throughput import ThroughputMeter
from trainer.run.interrupt import Interrupt
from trainer.run.step import StepResult, training_step
from trainer.specs.run import Phase, RunSpec
from trainer.storage.run_folder import RunFolder


class Loop:
    """Trains a model from where it stands to the end of the run, or to where it is told to stop.

    Everything it works on is given: it builds nothing and reads no spec files. ``progress`` says how far
    the run has come; a resumed run starts with its checkpoint's. ``sources`` are the data of each phase, the
    same object where they are the same.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        sources: Sequence[DataSource],
        evaluation_sets: Mapping[str, EvaluationSet],
        folder: RunFolder,
        display: Display,
        checkpointer: Checkpointer,
        progress: TrainingProgress = TrainingProgress(),  # noqa: B008  # frozen
        callbacks: Callbacks | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.ranks = layout.ranks
        self.model = layout.model
        self.optimizer = optimizer
        self.schedule = schedule
        self.sources = sources
        self.evaluation_sets = evaluation_sets
        self.folder = folder
        self.device = self.ranks.device
        self.display = display
        self._search_watch, self._adjoint_watch = search_watch(), adjoint_watch()
        self.progress = progress
        self.phases = spec.phase_specs()
        self.loader = self._loader_of(sources[0])
        self.total_steps = spec.total_steps
        self.last_row: dict[str, Any] = folder.metrics.last_row() or {}
        self.checkpointer = checkpointer
        self._backends = BackendRecord(folder if self.ranks.is_main else None, display)
        self._began = time.perf_counter() - progress.seconds
        self._model_spec: ModelSpec = spec.model
        self._phase: Phase | None = None
        self._interrupt = Interrupt()
        self.stopped_by: int | None = None
        """The signal that ended the run, if one did."""
        self.callbacks = Callbacks() if callbacks is None else callbacks
        self._checkpoint_activations: Callable[[str], None] | None = getattr(
            self.model, "checkpoint_activations", None
        )
        self._throughput = ThroughputMeter(
            devices=self.ranks.world_size,
            device=self.device,
            peak=spec.training.peak_flops,
        )
        context = CallbackContext(
            spec=spec,
            model=self.model,
            optimizer=optimizer,
            device=self.device,
            is_main=self.ranks.is_main,
            rank=self.ranks.rank,
            folder=folder.path,
            log=display.log,
            stop=self.callbacks.stop,
        )
        self._dispatcher = CallbackDispatcher(self.callbacks, context, ranks=self.ranks)
        self._manager = CheckpointManager(
            folder,
            checkpointer,
            layout=layout,
            display=display,
            notify=self._dispatcher.notify,
            begun_at=progress.step,
            stops_at_failures=spec.training.on_failed_save == "stop",
        )

    # ------------------------------------------------------------------------------------ the run

    def run(self, *, stop_at: int | None = None) -> list[EvaluationResult] | None:
        """Train to the end and evaluate; return the results, or None if the run was stopped before its end.

        A run that is stopped, by ``stop_at`` (a step) or by a signal, has saved a checkpoint; an evaluation
        that a signal cut short is made up for when the run is resumed. One that a callback ends is finished
        early: saved and evaluated, too.

        Raises:
            NonFiniteLossError: the loss or the gradient is not a number; the last checkpoint is as it was.
            DataError: the data of a step can't be used; the same.
            CallbackError: a callback that the run needs failed; a checkpoint has been saved.
            FailedSaveError: a checkpoint can't be written, and the spec doesn't say to go on without.
            LostPeerError: another process is gone in the middle of a save.
            FailedRecordError: the metrics can't be written, likewise.

        """
        end = self.total_steps if stop_at is None else min(stop_at, self.total_steps)
        self._began = time.perf_counter() - self.progress.seconds
        self.display.start(step=self.progress.step, total=self.total_steps)
        try:
            finished, results = False, None
            with Interrupt() as self._interrupt:
                self._dispatcher.notify("on_start", step=self.progress.step, checkpoint=self.last_checkpoint)
                if self._owes_evaluation():
                    self._enter_phase(self.progress.step - 1)
                    self._evaluate()
                while self.progress.step < end and not self._asked_to_stop():
                    self._one_step()
                    self._backends.update()
                    self._manager.poll()
                self._save()
                self._manager.poll(wait=True)
                self._dispatcher.raise_failure()
                self._manager.require_records(self.progress.step)
                if self.progress.step >= self.total_steps or self.callbacks.stop_reason is not None:
                    # A run resumed at its end has not been in its last phase yet.
                    self._enter_phase(max(0, self.progress.step - 1))
                    results = self._evaluate()
                    self._backends.update()
                    finished = results is not None
            if finished and self.spec.training.export_every is not None:
                self._export()
            self._dispatcher.notify("on_end", step=self.progress.step, finished=finished)
            self._dispatcher.raise_failure()
            return results
        except CallbackError:
            self._save()
            raise
        finally:
            self._manager.end()
            self.loader.close()
            self.display.close()
            self.folder.metrics.close()
            self.folder.evaluations.close()

    def _one_step(self) -> None:
        phase = self._enter_phase(self.progress.step)
        training = phase.training
        step = self.progress.step + 1
        began = time.perf_counter()
        rate = self.schedule.rate(step - 1, peak=training.optimizer.learning_rate)
        set_learning_rate(self.optimizer, rate)
        first = self.progress.samples
        own, *following = self._own_ranges(step - 1, first)
        try:
            batch = self.ranks.run_all(lambda: self.loader.batch(*own, following=following))
        except ValueError as error:
            raise DataError(f"the data of step {step} can't be used: {error}") from error
        tokens = batch.tokens * self.ranks.world_size  # the ranks' shares are equal

        result = training_step(
            self.layout,
            self.optimizer,
            batch,
            precision=training.precision,
            micro_batch_size=training.sequences_at_once,
            max_grad_norm=training.max_grad_norm,
            last_tokens=self.spec.evaluation.last_tokens,
        )
        skipped = result.not_finite is not None
        if skipped:
            self._skip(result, step=step, phase=phase, first=first)
        now = time.perf_counter()
        self.progress = replace(
            self.progress,
            step=step,
            phase=phase.name,
            samples=first + training.batch_size,
            tokens=self.progress.tokens + tokens,
            seconds=now - self._began,
            skipped=self.progress.skipped + skipped,
            skipped_in_a_row=self.progress.skipped_in_a_row + 1 if skipped else 0,
        )
        self._record(result, phase=phase, rate=rate, tokens=tokens, step_seconds=now - began)
        if self._due(training.evaluate_every) and step < self.total_steps:
            self._evaluate()
        if self._due(training.checkpoint_every):
            self._save()
        if self._due(training.export_every) and step < self.total_steps:
            self._export()

    def _own_ranges(self, step: int, first: int) -> list[tuple[int, int]]:
        """Return this rank's part of the batch that begins at sample ``first``, and of the next ones."""
        ranges: list[tuple[int, int]] = []
        for ahead in range(step, min(step + 1 + self.loader.depth, self.total_steps)):
            phase = self._phase_at(ahead)
            if self._source_of(phase) is not self.data:
                break
            size = phase.training.batch_size
            offset, count = rank_share(size, rank=self.ranks.rank, world_size=self.ranks.world_size)
            ranges.append((first + offset, count))
            first += size
        return ranges

    def _skip(self, result: StepResult, *, step: int, phase: Phase, first: int) -> None:
        """Say that a batch made no update, or refuse to go on; all ranks have the same result."""
        training, quantity = self.spec.training, result.not_finite
        assert quantity is not None
        error = NonFiniteLossError(
            step=step,
            phase=phase.name,
            quantity=quantity,
            value=result.loss if quantity == "loss" else result.gradient_norm,
            samples=(first, first + phase.training.batch_size),
            skipped_before=self.progress.skipped_in_a_row,
        )
        if training.non_finite == "stop" or error.skipped_before >= training.max_consecutive_skips:
            raise error
        self.display.log(f"WARNING: {error.what}; the batch is skipped ({self.progress.skipped + 1} so far)")

    def _asked_to_stop(self) -> bool:
        """Whether some rank was, by a signal, a callback, or a failed callback or save: all stop together."""
        asked = (
            self._interrupt.received or 0,
            self.callbacks.stop_reason is not None,
            self._dispatcher.failed,
            self._manager.must_stop,
        )
        by_signal, by_callback, failed, not_saved = self.ranks.max(list(map(float, asked)))
        if by_signal:
            self.stopped_by = int(by_signal)
        if by_callback and self.callbacks.stop_reason is None:
            self.callbacks.stop("a callback of another process asked for it")
        return bool(by_signal or by_callback or failed or not_saved)

    def _signalled(self) -> bool:
        """Whether a signal has come to some rank; noted on all."""
        self.stopped_by = int(self.ranks.max([self._interrupt.received or 0])[0]) or None
        return self.stopped_by is not None

    def _due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _phase_at(self, step: int) -> Phase:
        return next(phase for phase in self.phases if phase.first_step <= step < phase.last_step)

    @property
    def data(self) -> DataSource:
        """The data of the phase that the run is in."""
        return self.loader.source

    def _source_of(self, phase: Phase) -> DataSource:
        return self.sources[self.phases.index(phase)]

    def _loader_of(self, source: DataSource) -> Prefetcher:
        return Prefetcher(source, workers=self.spec.training.loader_threads, pin=self.device.type == "cuda")

    def _enter_phase(self, step: int) -> Phase:
        phase = self._phase_at(step)
        if phase.model != self._model_spec:
            self.model.reconfigure(phase.model)  # type: ignore[operator]  # the contract of language models
            self._model_spec = phase.model
            self.display.log(f"phase {phase.name}: steps {phase.first_step + 1} to {phase.last_step}")
        if phase is not self._phase:
            self._phase = phase
            if (source := self._source_of(phase)) is not self.data:
                self.loader.close()
                self.loader = self._loader_of(source)
            if self._checkpoint_activations is not None:
                self._checkpoint_activations(phase.training.checkpoint_activations)
            self._dispatcher.notify("on_phase", step=step, phase=phase)
        return phase

    # ------------------------------------------------------------------------------------ what is left behind

    def _record(
        self, result: StepResult, *, phase: Phase, rate: float, tokens: int, step_seconds: float
    ) -> None:
        self.last_row = {
            "step": self.progress.step,
            "phase": self.progress.phase,
            # Losses and norms are not rounded: two runs can be compared to the last bit by their metrics.
            "loss": result.loss,
            "accuracy": result.accuracy,
            "accuracy_last": result.accuracy_last,
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "skipped": result.not_finite,
            **search_row(result.search),
            **adjoint_row(result.adjoint),
            "tokens": self.progress.tokens,
            **epoch_row(self.data.epochs(self.progress.samples)),
            "samples": self.progress.samples,
            "tokens_per_second": round(tokens / step_seconds, 1),
            **self._throughput.row(result, phase=phase, tokens=tokens, seconds=step_seconds),
            "step_seconds": round(step_seconds, 4),
            "save_stall_seconds": round(self._manager.take_stall(), 4),
            "seconds": round(self.progress.seconds, 3),
        }
        self._manager.record(self.last_row)
        self.display.step(self.last_row)
        self._watch(result)
        self._dispatcher.notify("on_step", row=self.last_row)

    def _watch(self, result: StepResult) -> None:
        """Say once where the searches or the adjoints of the run don't converge."""
        rule: Any = getattr(self.model, "stopping", None)
        gradient: Any = getattr(self.model, "gradient", None)
        supposed = rule is not None and expects_convergence(
            searches=gradient.searches, tolerance=rule.tolerance, max_iterations=rule.max_iterations
        )
        for watch, solves in (
            (self._search_watch, result.search if supposed else None),
            (self._adjoint_watch, result.adjoint),
        ):
            if solves is not None and (message := watch.add(solves.non_converged)) is not None:
                self.display.log(f"WARNING: {message}")

    def _save(self) -> None:
        self._manager.save(self.progress, seconds=self._seconds)

    def _export(self) -> None:
        self._manager.export(self._model_spec, step=self.progress.step, length=self.spec.data.seq_len)

    def _seconds(self) -> float:
        """Return how long the run has been trained, earlier starts included."""
        return time.perf_counter() - self._began

    def _owes_evaluation(self) -> bool:
        """Whether the run was stopped in an evaluation: at its step there is a checkpoint, but no result."""

        def missing() -> bool:
            last = self.folder.evaluations.last_row()
            return last is None or last["step"] < self.progress.step

        due = self._due(self.spec.training.evaluate_every) and 0 < self.progress.step < self.total_steps
        return due and self.ranks.run_on_rank0(missing)

    def _evaluate(self) -> list[EvaluationResult] | None:
        """Evaluate the model, and write and show the results; None where a signal cut it short."""
        evaluation = self.spec.evaluation
        try:
            with self.layout.gathered():
                results = evaluate(
                    self.model,
                    self.evaluation_sets.values(),
                    device=self.device,
                    precision=self.spec.training.precision,
                    batch_size=evaluation.batch_size,
                    last_tokens=evaluation.last_tokens,
                    window_length=evaluation.window_length,
                    announce=self.display.doing,
                    ranks=self.ranks,
                    equal_calls=self.layout.communicates_in_the_loop,
                    stop=self._signalled,
                )
        except EvaluationStopped:
            self.display.log(f"the evaluation after step {self.progress.step} was cut short by a signal")
            return None
        self.progress = replace(self.progress, seconds=self._seconds())
        if self.ranks.is_main:
            where = {"step": self.progress.step, "phase": self.progress.phase}
            # Together: a process that is killed leaves all sets of an evaluation behind, or none.
            self.folder.evaluations.write(*({**where, **each.as_row(by_position=False)} for each in results))
        if results:
            words = self.spec.data.task is not None
            shown = table(results, last_tokens=evaluation.last_tokens, words=words)
            self.display.log(f"evaluation after step {self.progress.step}\n{shown}")
        self._dispatcher.notify("on_evaluation", step=self.progress.step, results=results)
        return results

    @property
    def unsaved(self) -> bool:
        """Whether what was trained last is in no checkpoint, as where saves fail and the run goes on."""
        return self.progress.step not in (0, self._manager.saved_step)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint this loop wrote or started from."""
        return self._manager.last_checkpoint

    @property
    def stalled_seconds(self) -> float:
        """Seconds that saves have held up training since the loop began."""
        return self._manager.stalled_seconds
