"""What can go wrong in a run that the user should hear about in one sentence, without a traceback."""

from __future__ import annotations

from pathlib import Path


class RunFolderError(ValueError):
    """An output folder that can't be used as asked: it holds a run, or none where one was expected."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, cut short, altered, or of another model."""


class DeviceError(ValueError):
    """A device that isn't there."""


class DataError(ValueError):
    """Training data that turn out unusable as they are read, such as a token id outside the vocabulary."""


class CallbackError(RuntimeError):
    """A callback failed at an event of the run; training as such is sound, and was saved.

    Attributes:
        callback: kind, distribution and version.
        event: the method that raised.

    """

    def __init__(self, *, callback: str, event: str, error: Exception) -> None:
        self.callback = callback
        self.event = event
        super().__init__(
            f"{callback} failed in {event}: {type(error).__name__}: {error}; mend it, take it out of "
            "`callbacks`, or let the run go on without it by its `required: false`"
        )


class PeerError(RuntimeError):
    """Another process of the run failed, in its own words."""


class LostPeerError(RuntimeError):
    """Another process of the run was gone in the middle of a save, which takes all of them.

    Attributes:
        step: the step whose checkpoint is missing.
        kept: the newest checkpoint there is, or None.

    """

    def __init__(self, *, step: int, reason: str, kept: Path | None) -> None:
        self.step = step
        self.kept = kept
        before = "there is no checkpoint" if kept is None else f"the last checkpoint, {kept}, is whole"
        super().__init__(
            f"another process of the run was gone while the checkpoint of step {step} was saved ({reason}); "
            f"{before}; its own output tells why it ended; go on by --resume"
        )


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient stopped being a number; the update was not made.

    Attributes:
        step: the step (counted from 1) whose update was refused.
        phase: the name of the phase it belongs to.
        quantity: ``"loss"`` or ``"gradient norm"``.
        value: what was measured, infinite or not a number.
        samples: the global sample positions ``(first, one past the last)`` of the batch concerned.
        skipped_before: batches skipped for the same reason right before it.
        what: all that in a sentence, without what to do about it.

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
        before = f", nor those of the {skipped_before} steps before" if skipped_before else ""
        super().__init__(
            f"{self.what}{before}; "
            "lower training.optimizer.learning_rate or lengthen training.schedule.warmup"
        )


class FailedSaveError(RuntimeError):
    """A checkpoint or an export could not be written, such as to a full disk; those before are as they were.

    Attributes:
        step: the step whose checkpoint is missing.
        reason: what the operating system said.
        kept: the newest checkpoint there is, or None.
        what: the same in words, without what to do.

    """

    def __init__(self, *, step: int, reason: str, kept: Path | None, what: str = "checkpoint") -> None:
        self.step = step
        self.reason = reason
        self.kept = kept
        before = "there is no checkpoint" if kept is None else f"the last checkpoint, {kept}, is whole"
        self.what = f"the {what} of step {step} could not be saved ({reason}); {before}"
        super().__init__(
            f"{self.what}; make room, or set training.on_failed_save=continue to train on without"
        )


class FailedRecordError(RuntimeError):
    """A run's metrics can't be written, such as to a full disk; it has been stopped, and saved if it could.

    Attributes:
        step: the step it was stopped after.
        reason: what the operating system said.

    """

    def __init__(self, *, step: int, reason: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(
            f"the metrics can't be written ({reason}); stopped after step {step}; make room and go on by "
            "--resume, or set training.on_failed_save=continue, which keeps them in memory meanwhile"
        )
