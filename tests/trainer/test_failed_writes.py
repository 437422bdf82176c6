"""Metrics and checkpoints that cannot be written end the run, or are logged, as the spec says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.checkpoint.folder import TrainingProgress
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import Ranks, alone
from trainer.errors import FailedRecordError, FailedSaveError
from trainer.reporting.recorder import StepRecorder, ThroughputMeter
from trainer.storage.run_folder import RunFolder

CPU = torch.device("cpu")
FULL = OSError(28, "No space left on device")


class Checkpointer:
    """Saves nothing, and fails at the given steps."""

    def __init__(self, *failing: int) -> None:
        self._failing = failing
        self._step = 0
        self.failed = self.ended = False

    def save(self, progress: TrainingProgress) -> None:
        self._step = progress.step

    def wait(self) -> None:
        if self._step in self._failing:
            raise FailedSaveError(step=self._step, reason="full", kept=None)


@pytest.fixture
def make_manager(tmp_path: Path) -> Callable[..., tuple[CheckpointManager, Checkpointer, list[str]]]:
    """Return a function that makes a manager, with its checkpointer and the list of its messages."""

    def make(*failing: int, stops: bool) -> tuple[CheckpointManager, Checkpointer, list[str]]:
        messages: list[str] = []
        display: Any = SimpleNamespace(log=messages.append, doing=lambda text: None)
        checkpointer: Any = Checkpointer(*failing)
        manager = CheckpointManager(
            RunFolder(tmp_path),
            checkpointer,
            layout=alone(torch.nn.Linear(1, 1), CPU),
            display=display,
            notify=lambda event, **details: None,
            begun_at=0,
            stop_on_failure=stops,
        )
        return manager, checkpointer, messages

    return make


@pytest.mark.parametrize("file", ["metrics", "evaluations"])
@pytest.mark.parametrize("stops", [True, False])
def test_unwritten_metrics_end_the_run_or_are_logged_once(tmp_path: Path, file: str, stops: bool) -> None:
    folder, messages = RunFolder(tmp_path), list[str]()
    display: Any = SimpleNamespace(log=messages.append)
    meter = ThroughputMeter(devices=1, device=CPU, peak=None)
    recorder = StepRecorder(folder, meter=meter, display=display, ranks=Ranks(CPU), stop_on_failure=stops)
    assert not recorder.must_stop
    recorder.require_written(1)
    for each in (folder.metrics, folder.evaluations):
        each._push = lambda: None  # type: ignore[method-assign]  # nothing is written here
    full = getattr(folder, file)
    full._push = lambda: setattr(full, "trouble", FULL)
    folder.evaluations.write({"step": 1})
    for step in (1, 2, 3):
        recorder.write({"step": step})
    assert recorder.must_stop == stops
    if stops:
        assert messages == []
        with pytest.raises(FailedRecordError, match="stopped after step 3"):
            recorder.require_written(3)
    else:
        recorder.require_written(3)
        (message,) = messages
        assert "No space left on device" in message


def test_a_failed_save_is_logged_and_the_next_one_succeeds(make_manager: Any) -> None:
    manager, _, messages = make_manager(2, stops=False)
    for step in (2, 4):
        manager.save(TrainingProgress(step=step), seconds=lambda: 1.0)
    manager.save(TrainingProgress(step=4), seconds=lambda: 1.0)  # started already
    assert (manager.saved_step, manager.last_checkpoint) == (None, None)
    manager.poll(wait=True)
    assert manager.saved_step == 4
    (message,) = messages
    assert "checkpoint of step 2 could not be saved (full)" in message


def test_a_save_that_fails_in_the_background_ends_the_run(make_manager: Any) -> None:
    for stops in (True, False):
        manager, checkpointer, _ = make_manager(stops=stops)
        manager.save(TrainingProgress(step=1), seconds=lambda: 1.0)
        assert not manager.must_stop
        checkpointer.failed = True
        assert manager.must_stop == stops


def test_a_stall_is_returned_once(make_manager: Any) -> None:
    manager, _, _ = make_manager(stops=True)
    manager.save(TrainingProgress(step=1), seconds=lambda: 1.0)
    stalled = manager.take_stall()
    assert 0 < stalled == manager.stalled_seconds
    assert manager.take_stall() == 0.0
    assert manager.stalled_seconds == stalled
