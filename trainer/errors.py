"""Errors of a run that the command line reports in one sentence, without a traceback."""

from __future__ import annotations

from pathlib import Path


class RunFolderError(ValueError):
    """An output folder that holds a run where none is expected, or no run where one is expected."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, truncated, altered, or of another model."""


class DeviceError(ValueError):
    """A device that is not available."""


class DataError(ValueError):
    """Training data that prove unusable when they are read, such as a token ID outside the vocabulary."""


class CallbackError(RuntimeError):
    """A callback failed at an event of the run. Training itself is intact and was saved.

    Attributes:
        callback: kind, distribution and version of the callback.
        event: the method that raised.

    """

    def __init__(self, *, callback: str, event: str, error: Exception) -> None:
        self.callback = callback
        self.event = event
        super().__init__(
            f"{callback} failed in {event}: {type(error).__name__}: {error}; fix it, remove it from "
            "`callbacks`, or set its `required: false` to continue without it"
        )


class PeerError(RuntimeError):
    """Another process of the run failed; the message is that of its error."""


class LostPeerError(RuntimeError):
    """Another process of the run ended during a save, which needs all processes.

    Attributes:
        step: the step whose checkpoint is missing.
        kept: the newest complete checkpoint, or None.

    """

    def __init__(self, *, step: int, reason: str, kept: Path | None) -> None:
        self.step = step
        self.kept = kept
        super().__init__(
            f"another process of the run ended while the checkpoint of step {step} was saved ({reason}); "
            f"{_last_checkpoint(kept)}; see the output of that process for the cause, then use --resume"
        )


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite; the update was not made.

    Attributes:
        step: the step, counted from 1, without an update.
        phase: the name of its phase.
        quantity: ``"loss"`` or ``"gradient norm"``.
        value: of the quantity: NaN or infinite.
        samples: the global sample positions ``(first, one past the last)`` of the batch.
        skipped_before: number of batches skipped directly before it.
        what: the message without the remedy.

    """

    def __init__(
        self,
        *,
        step: int,
        phase: str,
        quantity: str,
        value: float,
        samples: tuple[int, int],
        skipped_before: int = 0,
    ) -> None:
        self.step = step
        self.phase = phase
        self.quantity = quantity
        self.value = value
        self.samples = samples
        self.skipped_before = skipped_before
        self.what = (
            f"the {quantity} is {value} at step {step} (phase {phase!r}, "
            f"samples {samples[0]} to {samples[1] - 1}); the update was not made"
        )
        before = f", nor those of the previous {skipped_before} steps" if skipped_before else ""
        super().__init__(
            f"{self.what}{before}; "
            "lower training.optimizer.learning_rate or lengthen training.schedule.warmup"
        )


class FailedSaveError(RuntimeError):
    """A checkpoint or an export could not be written, for example to a full disk; earlier ones are intact.

    Attributes:
        step: the step whose checkpoint is missing.
        reason: the error of the operating system.
        kept: the newest complete checkpoint, or None.
        what: the message without the remedy.

    """

    def __init__(self, *, step: int, reason: str, kept: Path | None, what: str = "checkpoint") -> None:
        self.step = step
        self.reason = reason
        self.kept = kept
        self.what = f"the {what} of step {step} could not be saved ({reason}); {_last_checkpoint(kept)}"
        super().__init__(
            f"{self.what}; free disk space, or set training.on_failed_save=continue to train without it"
        )


class FailedRecordError(RuntimeError):
    """The metrics cannot be written, for example to a full disk; the run was stopped and, if possible, saved.

    Attributes:
        step: the last step of the run.
        reason: the error of the operating system.

    """

    def __init__(self, *, step: int, reason: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(
            f"the metrics can't be written ({reason}); stopped after step {step}; free disk space and use "
            "--resume, or set training.on_failed_save=continue to keep them in memory until they can"
        )


def _last_checkpoint(kept: Path | None) -> str:
    return "there is no checkpoint" if kept is None else f"the last checkpoint, {kept}, is intact"
