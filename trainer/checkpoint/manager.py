"""When checkpoints and exports of a run are written, and what happens if one cannot be written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from implicit_blocks.specs import ModelSpec
from trainer.checkpoint.export import export_model
from trainer.checkpoint.folder import TrainingProgress, step_name
from trainer.checkpoint.writer import Checkpointer, SaveTimes
from trainer.distributed import Layout
from trainer.errors import CallbackError, FailedSaveError, LostPeerError, PeerError
from trainer.optim.ema import WeightAverage, averaged
from trainer.reporting.display import Display
from trainer.storage.run_folder import RunFolder


class CheckpointManager:
    """Saves checkpoints and exports of a run, and tracks the save in progress.

    A checkpoint is written in the background: :meth:`save` starts it, :meth:`poll` notices its end. Every
    rank has a manager and calls it at the same steps.

    Args:
        folder: of the run.
        checkpointer: writes the checkpoints.
        layout: of the model that is exported.
        average: of the model's weights; exported in their place.
        display: shows failures after which the run continues.
        notify: notifies the callbacks of an event.
        begun_at: step of the checkpoint that the run resumed from; 0: none.
        stop_on_failure: whether a failed save ends the run.

    """

    def __init__(
        self,
        folder: RunFolder,
        checkpointer: Checkpointer,
        *,
        layout: Layout,
        average: WeightAverage | None = None,
        display: Display,
        notify: Callable[..., None],
        begun_at: int,
        stop_on_failure: bool,
    ) -> None:
        self._folder = folder
        self._checkpointer = checkpointer
        self._model = layout.model
        self._average = average
        self._ranks = layout.ranks
        self._display = display
        self._notify = notify
        self._stop_on_failure = stop_on_failure
        self.saved_step: int | None = begun_at if begun_at > 0 else None
        """Step of the newest complete checkpoint, or None."""
        self._begun_save: int | None = None
        self._stalled = 0.0
        self.stalled_seconds = 0.0
        """Seconds that saves have stalled training since the manager was created."""

    @property
    def saves(self) -> list[SaveTimes]:
        """Duration and size of the checkpoints saved since the manager was created, in order."""
        return self._checkpointer.saves

    def take_stall(self) -> float:
        """Return the seconds that saves have stalled training since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def save(self, progress: TrainingProgress, *, seconds: Callable[[], float]) -> None:
        """Start to save a checkpoint, unless this step is saved already; wait for a save in progress.

        ``seconds`` returns the training time of the run, and is called when the copying begins.
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
        """Process the end of the save in progress; with ``wait``, wait for it."""
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
        """Wait for the save in progress when the run ends; log its failure instead of raising it."""
        try:
            self.poll(wait=True)
        except (FailedSaveError, LostPeerError, CallbackError) as error:
            self._display.log(f"WARNING: {error}")

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, possibly the one that the run resumed from."""
        return None if self.saved_step is None else self._folder.checkpoints / step_name(self.saved_step)

    def export(self, model_spec: ModelSpec, *, step: int, length: int) -> None:
        """Export the model for other programs; training waits."""
        self._display.doing("exporting the model")
        try:
            with averaged(self._average):
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

    @property
    def must_stop(self) -> bool:
        """Whether the save in progress has failed in this process and the run has to end for it."""
        return self._begun_save is not None and self._stop_on_failure and self._checkpointer.failed

    def _fail(self, error: FailedSaveError) -> None:
        if self._stop_on_failure:
            raise error
        self._display.log(f"WARNING: {error.what}; the run continues")
