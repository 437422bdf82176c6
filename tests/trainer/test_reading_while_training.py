"""Reading a run while it trains, and runs that start at the same time."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.checkpoints.find import read_newest, require_whole
from trainer.checkpoint.folder import TrainingProgress, newest_sound_checkpoint, step_name
from trainer.checkpoint.writer import Checkpointer
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder, claim_folder

Small = Callable[..., RunSpec]


@pytest.fixture
def run(small: Small, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    build(small({"training.max_steps": 1}), output=folder, device="cpu").train()
    return folder


class Saving:
    """Saves the checkpoint of one step after the other at ``keep=1``, in a thread, until the block ends."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._writer = Checkpointer(folder, model=model, optimizer=optimizer, spec_digest="d", keep=1)
        self._thread = threading.Thread(target=self._save)
        self._end = threading.Event()
        self.saved = 0

    def _save(self) -> None:
        step = 1
        while not self._end.is_set():
            step += 1
            self._writer.save(TrainingProgress(step=step))
            self._writer.wait()
            self.saved += 1

    def __enter__(self) -> Saving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_a_run_that_keeps_one_checkpoint_can_be_read_at_any_moment(run: Path) -> None:
    model = ib.load_model(run)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Saving(run / "checkpoints", model) as saving:
        for _ in range(25):
            state = ib.load_model(run).state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
            newest_sound_checkpoint(run / "checkpoints")
    assert saving.saved > 5


@pytest.mark.parametrize("moment", ["listed", "checked", "half removed"])
def test_a_checkpoint_that_is_removed_while_it_is_read(run: Path, moment: str) -> None:
    """The next checkpoint is written, and the one that is being read is removed, at any moment."""
    folder = run / "checkpoints"
    first, second = folder / step_name(1), folder / step_name(2)
    seen: list[str] = []

    def replace() -> None:
        if not second.exists():
            shutil.copytree(first, folder / "copy")
            (folder / "copy").rename(second)
            if moment == "half removed":
                (first / "state.json").unlink()
            else:
                shutil.rmtree(first)

    def require(path: Path) -> None:
        if moment != "checked":
            replace()
        require_whole(path)

    def read(path: Path) -> str:
        replace()
        if not (path / "state.json").is_file():
            raise ValueError(f"{path} is gone")
        seen.append(path.name)
        return path.name

    assert read_newest(folder, require, read) == (second, second.name, [])
    assert seen == [second.name]


def test_a_permanently_damaged_checkpoint_is_not_read_again(run: Path) -> None:
    folder, calls = run / "checkpoints", list[Path]()

    def read(path: Path) -> Any:
        calls.append(path)
        raise ValueError("it doesn't fit")

    with pytest.raises(ValueError, match="it doesn't fit"):
        read_newest(folder, require_whole, read)
    assert len(calls) == 1
    next(folder.glob("step-*/__0_0.distcp")).unlink()
    path, _, complaints = read_newest(folder, require_whole, read)
    assert path is None
    assert len(complaints) == 1
    assert len(calls) == 1


def test_reading_ends_if_the_run_keeps_removing_checkpoints(run: Path) -> None:
    folder, step = run / "checkpoints", 1

    def require(path: Path) -> None:
        nonlocal step
        step += 1
        path.rename(folder / step_name(step))
        raise ValueError("it was renamed")

    assert read_newest(folder, require, require, seconds=0.2) == (None, None, ["it was renamed"])


def test_a_reader_never_finds_part_of_a_removed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.checkpoint import folder as checkpoint_folder

    removed: list[str] = []
    monkeypatch.setattr(checkpoint_folder, "remove_tree", lambda path: removed.append(path.name))
    for step in (1, 2):
        (tmp_path / step_name(step)).mkdir()
    checkpoint_folder.prune(tmp_path, newest=tmp_path / step_name(2), keep=1)
    assert removed == [f"{step_name(1)}.tmp-removed"]
    assert checkpoint_folder.list_checkpoints(tmp_path) == [tmp_path / step_name(2)]


def test_runs_started_in_one_second_get_different_names(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    every = threading.Barrier(3)
    create = RunFolder.create

    def together(self: RunFolder, **parts: Any) -> None:
        every.wait(60)
        create(self, **parts)

    monkeypatch.setattr(RunFolder, "create", together)
    spec = small({"training.max_steps": 1})
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: build(spec, name="mine", device="cpu"), range(3)))
    folders = {run.folder.path for run in runs}
    assert len(folders) == 3
    for run in runs:
        assert run.folder.spec_path.is_file()
        assert run.folder.path.name.startswith("mine-")
        run.folder.release()


def test_a_name_is_claimed_by_one_process_only(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_folder("mine", root=tmp_path / "runs"), range(40)))
    assert len(set(claimed)) == 40
    assert sorted((tmp_path / "runs").iterdir()) == sorted(claimed)


def test_a_refused_run_leaves_no_folder(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        build(small({"training.init_from": {"path": "nowhere"}}), name="mine", device="cpu")
    assert list(tmp_path.iterdir()) == []
