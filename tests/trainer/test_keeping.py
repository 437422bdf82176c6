"""What a run keeps where the disk refuses it: who is told, how often, and whether the run ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.checkpoint.folder import Progress
from trainer.checkpoint.manager import Keeper
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

    def save(self, progress: Progress) -> None:
        self._step = progress.step

    def wait(self) -> None:
        if self._step in self._failing:
            raise FailedSaveError(step=self._step, reason="full", kept=None)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Keeper, RunFolder, list[str]]]:
    """Return a maker of keepers that stop or go on, with their folder and what they say."""

    def make(*, stops: bool, failing: tuple[int, ...] = ()) -> tuple[Keeper, RunFolder, list[str]]:
        said: list[str] = []
        folder = RunFolder(tmp_path)
        display: Any = SimpleNamespace(say=said.append, doing=lambda text: None)
        checkpointer: Any = Checkpointer(*failing)
        keeper = Keeper(
            folder,
            checkpointer,
            layout=alone(torch.nn.Linear(1, 1), torch.device("cpu")),
            display=display,
            tell=lambda event, **details: None,
            begun_at=0,
            stops_at_failures=stops,
        )
        return keeper, folder, said

    return make


@pytest.mark.parametrize("file", ["metrics", "evaluations"])
def test_lines_that_cannot_be_written_end_the_run_or_are_said_once(made: Any, file: str) -> None:
    for stops in (True, False):
        keeper, folder, said = made(stops=stops)
        assert not keeper.must_stop
        keeper.require_records(1)
        for each in (folder.metrics, folder.evaluations):
            each._push = lambda: None  # type: ignore[method-assign]  # nothing is written here
        full = getattr(folder, file)
        full._push = lambda full=full: setattr(full, "trouble", FULL)
        folder.evaluations.write({"step": 1})
        for step in (1, 2, 3):
            keeper.record({"step": step})
        assert keeper.must_stop == stops
        if stops:
            assert said == []
            with pytest.raises(FailedRecordError, match="stopped after step 3; make room"):
                keeper.require_records(3)
        else:
            keeper.require_records(3)
            assert said == [
                "WARNING: the metrics can't be written ([Errno 28] No space left on device); they are kept"
            ]


def test_a_save_that_failed_is_made_up_for_at_the_next_one(made: Any) -> None:
    keeper, _, said = made(stops=False, failing=(2,))
    for step in (2, 4):
        keeper.save(Progress(step=step), seconds=lambda: 1.0)
    keeper.save(Progress(step=4), seconds=lambda: 1.0)  # begun already
    assert (keeper.saved_step, keeper.last_checkpoint) == (None, None)
    keeper.attend(wait=True)
    assert keeper.saved_step == 4
    assert said == [
        "WARNING: the checkpoint of step 2 could not be saved (full); there is no checkpoint; the run goes on"
    ]


def test_a_stall_is_told_once(made: Any) -> None:
    keeper, _, _ = made(stops=True)
    keeper.save(Progress(step=1), seconds=lambda: 1.0)
    stalled = keeper.take_stall()
    assert 0 < stalled == keeper.stalled_seconds
    assert keeper.take_stall() == 0.0
    assert keeper.stalled_seconds == stalled
