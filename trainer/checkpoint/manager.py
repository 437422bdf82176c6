"""What a run keeps on the disk while it trains, and what happens where the disk refuses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from implicit_blocks.specs import ModelSpec
from trainer.checkpoint.export import export_model
from trainer.checkpoint.load import Checkpointer, TrainingProgress, step_name
from trainer.distributed import Layout
from trainer.errors import CallbackError, FailedRecordError, FailedSaveError, LostPeerError, PeerError
from trainer.reporting.display import Display
from trainer.storage.run_folder import RunFolder


class CheckpointManager:
    """Keeps a run's metrics, checkpoints and exports in its folder.

    A checkpoint is written while training goes on: :meth:`save` begins it, :meth:`attend` takes note of its
    end. Every rank has a keeper and calls it at the same steps; one writes the metrics.

    Args:
        folder: of the run.
        checkpointer: writes the checkpoints.
        layout: of the model that is exported.
        display: where failures that the run survives are said.
        tell: tells the callbacks of an event.
        begun_at: the step that the run goes on from, whose checkpoint there is; 0: it begins.
        stops_at_failures: whether what can't be written ends the run.

    """

    def __init__(
        self,
        folder: RunFolder,
        checkpointer: Checkpointer,
        *,
        layout: Layout,
        display: Display,
        notify: Callable[..., None],
        begun_at: int,
        stops_at_failures: bool,
    ) -> None:
        self._folder = folder
        self._checkpointer = checkpointer
        self._model = layout.model
        self._ranks = layout.ranks
        self._display = display
        self._notify = notify
        self._stops_at_failures = stops_at_failures
        self.saved_step: int | None = begun_at if begun_at > 0 else None
        """The step of the newest checkpoint that is whole, or None."""
        self._begun_save: int | None = None
        self._said_unwritten = False
        self._stalled = 0.0
        self.stalled_seconds = 0.0
        """Seconds that saves have held up training since the manager was made."""

    # ------------------------------------------------------------------------------------ metrics

    def record(self, row: Mapping[str, Any]) -> None:
        """Write a row of metrics; say once if that fails and the run goes on."""
        if self._ranks.is_main:
            self._folder.metrics.write(row)
            trouble = self._unwritten  # of the evaluations too, written since the last row
            if trouble is not None and not self._said_unwritten and not self._stops_at_failures:
                self._display.log(f"WARNING: the metrics can't be written ({trouble}); they are kept")
            self._said_unwritten = trouble is not None

    def take_stall(self) -> float:
        """Return the seconds that saves have held up training since this was last asked."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def require_records(self, step: int) -> None:
        """Refuse, on every rank, to end as if all were well where the main one can't write its metrics."""

        def own() -> None:
            if self._stops_at_failures and self._unwritten is not None:
                raise FailedRecordError(step=step, reason=str(self._unwritten))

        self._ranks.run_all(own)

    @property
    def _unwritten(self) -> OSError | None:
        return self._folder.metrics.trouble or self._folder.evaluations.trouble

    # ------------------------------------------------------------------------------------ checkpoints

    def save(self, progress: TrainingProgress, *, seconds: Callable[[], float]) -> None:
        """Begin to save a checkpoint, unless this step's has been; the one in flight is waited for.

        ``seconds`` says how long the run has been trained when the writing begins.
        """
        if progress.step in (0, self.saved_step, self._begun_save):
            return
        began = time.perf_counter()
        self._display.doing("saving a checkpoint")
        self.poll(wait=True)
        self._notify("on_save", step=progress.step)
        try:
            self._checkpointer.save(replace(progress, seconds=seconds()))
        except FailedSaveError as error:
            self._fail(error)
        else:
            self._begun_save = progress.step
        stalled = time.perf_counter() - began
        self._stalled += stalled
        self.stalled_seconds += stalled

    def poll(self, *, wait: bool = False) -> None:
        """Take note of a save that has ended, or, where asked to, wait for its end."""
        step = self._begun_save
        if step is None or not (wait or self._checkpointer.ended):
            return
        self._begun_save = None
        try:
            self._checkpointer.wait()
        except FailedSaveError as error:
            self._fail(error)
            return
        self.saved_step = step
        self._notify("on_checkpoint", step=step, path=self._folder.checkpoints / step_name(step))

    def end(self) -> None:
        """See a save to its end when the run ends by an error, of which it must not distract."""
        try:
            self.poll(wait=True)
        except (FailedSaveError, LostPeerError, CallbackError) as error:
            self._display.log(f"WARNING: {error}")

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole, which may be the one that the run goes on from."""
        return None if self.saved_step is None else self._folder.checkpoints / step_name(self.saved_step)

    # ------------------------------------------------------------------------------------ exports

    def export(self, model_spec: ModelSpec, *, step: int, length: int) -> None:
        """Write the model for other programs to read; training waits."""
        self._display.doing("exporting the model")
        try:
            export_model(
                self._model,
                model_spec,
                self._folder.exports / step_name(step),
                length=length,
                ranks=self._ranks,
            )
        except (OSError, PeerError, SafetensorError) as error:
            failed = FailedSaveError(step=step, reason=str(error), kept=self.last_checkpoint, what="export")
            failed.__cause__ = error
            self._fail(failed)

    # ------------------------------------------------------------------------------------ failures

    @property
    def must_stop(self) -> bool:
        """Whether this process knows of something that couldn't be written and has to end the run."""
        return self._stops_at_failures and (self._checkpointer.failed or self._unwritten is not None)

    def _fail(self, error: FailedSaveError) -> None:
        if self._stops_at_failures:
            raise error
        self._display.log(f"WARNING: {error.what}; the run goes on")
