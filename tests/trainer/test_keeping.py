"""What a run keeps where the disk refuses it: who is told, how often, and whether the run ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.checkpoint.folder import TrainingProgress
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed import alone
from trainer.errors import FailedRecordError, FailedSaveError
from trainer.storage.run_folder import RunFolder

FULL = OSError(28, "No space left on device")


class Checkpointer:
    """Saves nothing, and fails at the steps it is told to."""

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
def made(tmp_path: Path) -> Callable[..., tuple[CheckpointManager, RunFolder, list[str]]]:
    """Return a maker of keepers that stop or go on, with their folder and what they say."""

    def make(*, stops: bool, failing: tuple[int, ...] = ()) -> tuple[CheckpointManager, RunFolder, list[str]]:
        messages: list[str] = []
        folder = RunFolder(tmp_path)
        display: Any = SimpleNamespace(log=messages.append, doing=lambda text: None)
        checkpointer: Any = Checkpointer(*failing)
        manager = CheckpointManager(
            folder,
            checkpointer,
            layout=alone(torch.nn.Linear(1, 1), torch.device("cpu")),
            display=display,
            notify=lambda event, **details: None,
            begun_at=0,
            stops_at_failures=stops,
        )
        return manager, folder, messages

    return make


@pytest.mark.parametrize("file", ["metrics", "evaluations"])
def test_lines_that_cannot_be_written_end_the_run_or_are_said_once(made: Any, file: str) -> None:
    for stops in (True, False):
        manager, folder, messages = made(stops=stops)
        assert not manager.must_stop
        manager.require_records(1)
        for each in (folder.metrics, folder.evaluations):
            each._push = lambda: None  # type: ignore[method-assign]  # nothing is written here
        full = getattr(folder, file)
        full._push = lambda full=full: setattr(full, "trouble", FULL)
        folder.evaluations.write({"step": 1})
        for step in (1, 2, 3):
            manager.record({"step": step})
        assert manager.must_stop == stops
        if stops:
            assert messages == []
            with pytest.raises(FailedRecordError, match="stopped after step 3; make room"):
                manager.require_records(3)
        else:
            manager.require_records(3)
            assert messages == [
                "WARNING: the metrics can't be written ([Errno 28] No space left on device); they are kept"
            ]


def test_a_save_that_failed_is_made_up_for_at_the_next_one(made: Any) -> None:
    manager, _, messages = made(stops=False, failing=(2,))
    for step in (2, 4):
        manager.save(TrainingProgress(step=step), seconds=lambda: 1.0)
    manager.save(TrainingProgress(step=4), seconds=lambda: 1.0)  # begun already
    assert (manager.saved_step, manager.last_checkpoint) == (None, None)
    manager.poll(wait=True)
    assert manager.saved_step == 4
    assert messages == [
        "WARNING: the checkpoint of step 2 could not be saved (full); there is no checkpoint; the run goes on"
    ]


def test_a_stall_is_told_once(made: Any) -> None:
    manager, _, _ = made(stops=True)
    manager.save(TrainingProgress(step=1), seconds=lambda: 1.0)
    stalled = manager.take_stall()
    assert 0 < stalled == manager.stalled_seconds
    assert manager.take_stall() == 0.0
    assert manager.stalled_seconds == stalled
