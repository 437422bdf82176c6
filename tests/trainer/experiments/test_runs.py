"""Runs shared by several processes: waiting for, reading and locking them."""

from __future__ import annotations

import fcntl
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.data.tokens import write_tokens
from trainer.errors import CheckpointError, RunFolderError
from trainer.experiments.common import runs
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]
CHANGES = {"training.max_steps": 2, "training.batch_size": 2, "evaluation.sequences": 2}


def test_a_run_that_another_process_trains_is_waited_for_and_read(
    tmp_path: Path, small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"name": "free", "model": {"stopping": {"max_iterations": 6}}}
    spec = small({**CHANGES, "phases": [{"name": "bounded", "until": 1}, free]})
    folder = tmp_path / "runs" / "one"
    finished = runs.train(spec, folder, name="one", device="cpu")
    assert runs.load_model(finished, torch.device("cpu")).spec == spec.final_model != spec.model
    before = (folder / "metrics.jsonl").read_bytes()
    (folder / "summary.json").rename(tmp_path / "summary.json")  # as while it is being trained
    found: list[runs.Finished] = []
    second = threading.Thread(target=lambda: found.append(runs.train(spec, folder, name="one", device="cpu")))
    # A lock belongs to an open file, so opening the file again acts like another process.
    with (folder.parent / ".one.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert "which is training one" in capsys.readouterr().err
        (tmp_path / "summary.json").rename(folder / "summary.json")
    second.join(60)
    assert [one.summary for one in found] == [finished.summary]
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in folder.parent.iterdir() if not path.name.startswith(".")) == ["one"]


def test_a_finished_run_without_its_last_checkpoint_is_not_measured(
    tmp_path: Path, small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier version used the weights of an intermediate step as those of the finished run."""
    spec = small({**CHANGES, "training.checkpoint_every": 1, "training.keep_checkpoints": 2})
    finished = runs.train(spec, tmp_path / "one", name="one", device="cpu")
    last = tmp_path / "one" / "checkpoints" / "step-00000002" / "__0_0.distcp"
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"trained for 2 steps, but .* is step-00000001 \(.*truncated"):
        runs.load_model(finished, torch.device("cpu"))
    assert runs.find_trained_run(tmp_path / "one")[2].name == "step-00000001"
    assert "using step-00000001 instead" in capsys.readouterr().err


def test_a_finished_run_on_other_data_is_not_read(tmp_path: Path, small: Small) -> None:
    tokens = np.arange(400) % 6
    write_tokens(tmp_path / "text.bin", tokens, vocab_size=6)
    data = {"kind": "tokens", "path": str(tmp_path / "text.bin"), "seq_len": 12}
    model = {"model.vocab_size": 6, "evaluation.lengths": [12], "evaluation.identity_probabilities": []}
    spec = small({**CHANGES, **model, "data": data})
    finished = runs.train(spec, tmp_path / "one", name="one", device="cpu")
    assert runs.train(spec, tmp_path / "one", name="one", device="cpu").summary == finished.summary
    write_tokens(tmp_path / "text.bin", tokens[:300], vocab_size=6)
    with pytest.raises(RunFolderError, match="differ from those it was trained on"):
        runs.train(spec, tmp_path / "one", name="one", device="cpu")


def test_one_of_several_ranks_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with runs._exclusive(tmp_path / "one"), runs._exclusive(tmp_path / "one"):
        assert not (tmp_path / ".one.lock").exists()


def test_a_finished_run_holds_no_memory_beside_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Small
) -> None:
    """The model of a run is freed without waiting for Python's garbage collector."""
    models = []
    build = runs.build

    def watched(*args: Any, **options: Any) -> Any:
        run = build(*args, **options)
        models.append(weakref.ref(run.model))
        run.model.backbone.held = [run.model]  # a reference cycle, as captured graphs have
        return run

    monkeypatch.setattr(runs, "build", watched)
    gc.disable()
    try:
        finished = [
            runs.train(small(CHANGES), tmp_path / name, name=name, device="cpu") for name in ("one", "two")
        ]
        alive = [model() is not None for model in models]
    finally:
        gc.enable()
    assert alive == [False, False]
    assert finished[0].summary["steps"] == 2
