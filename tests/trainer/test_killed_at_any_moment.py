"""Runs that are killed twenty times, also during saves, lose and repeat nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.reporting.metrics import read_metrics

SETTINGS = [
    "model.d_model=16", "model.mixer.d_state=8", "model.mixer.head_dim=8", "model.dropout=0.1",
    "training.batch_size=4", "training.threads=1", "training.checkpoint_every=2", "training.max_steps=48",
    "data.seq_len=12", "evaluation.lengths=[12]", "evaluation.sequences=4", "evaluation.batch_size=4",
    "phases.unrolled.model.gradient.steps=2", "phases.free.model.stopping.max_iterations=4",
    "model.gradient.steps=1", "model.at_evaluation.stopping.max_iterations=4",
]  # fmt: skip


def arguments(folder: Path, *options: str) -> list[str]:
    return [
        "--spec", "word_problem_s3", *SETTINGS, "--device", "cpu", "--output", str(folder), *options
    ]  # fmt: skip


def rows(folder: Path) -> list[tuple[Any, ...]]:
    kept = ("step", "phase", "loss", "gradient_norm", "learning_rate", "residual", "accuracy", "tokens")
    return [tuple(row[key] for key in kept) for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: Any) -> Path:
    """Return the folder of an uninterrupted run, and the number of its events."""
    folder: Path = tmp_path_factory.mktemp("whole") / "run"
    log, count = folder.with_name("log"), folder.with_name("count")
    assert forks.run(arguments(folder), log=log, count=str(count)) == 0, log.read_text()
    return folder


def test_a_run_killed_twenty_times_equals_the_whole_bit_by_bit(
    whole: Path, tmp_path: Path, forks: Any
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    events = int(whole.with_name("count").read_text())
    assert events > 800  # among them every tensor, file and rename of 24 saves

    draw = random.Random(0)
    kills, during_saves = 0, 0
    while kills < 20:
        resume = ["--resume"] if (folder / "spec.yaml").exists() else []
        # In turn at any event, of which most are within saves, and before or after a step, of which steps
        # every other time one without a save in flight: they are quicker than saves. The run must not come to
        # its end before it has been killed twenty times.
        if kills % 2:
            moment: dict[str, Any] = {"kill_at": draw.randrange(1, events // 10)}
        else:
            moment = {"kill_at_step": draw.randrange(1, 14), "idle": kills % 4 == 2}
        code = forks.run(arguments(folder, *resume), log=log, **moment)
        assert code == -signal.SIGKILL, f"{code} after {kills} kills:\n{log.read_text()[-3000:]}"
        kills += 1
        # Leftovers of an earlier kill stay until the next save begins; an idle run must not count them.
        during_saves += not moment.get("idle") and any((folder / "checkpoints").glob("*.tmp-*"))
    assert 5 <= during_saves <= 15
    assert len(rows(folder)) < 48
    assert forks.run(arguments(folder, "--resume"), log=log) == 0, log.read_text()
    assert rows(folder) == rows(whole)


def test_signals_save_the_run_and_name_the_resume_command(whole: Path, tmp_path: Path, forks: Any) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        before = len(rows(folder)) if folder.exists() else 0
        pid = forks.start(arguments(folder, *(["--resume"] if before else [])), log=log)
        wait_for_step(folder, before + 3)
        os.kill(pid, number)
        if number == signal.SIGTERM:
            os.kill(pid, number)  # a launcher may pass it on once more
        assert forks.wait(pid) == code, log.read_text()
        assert (
            f"stopped after step {len(rows(folder))}; continue by: python -m trainer --resume"
            in log.read_text()
        )
        assert (folder / "checkpoints" / f"step-{len(rows(folder)):08d}").is_dir()
    assert len(rows(folder)) < 48
    assert forks.run(arguments(folder, "--resume"), log=log) == 0, log.read_text()
    assert rows(folder) == rows(whole)


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached")


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path, forks: Any) -> None:
    whole, folder, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    few = "training.max_steps=4"
    assert forks.run(arguments(whole, few), log=log) == 0, log.read_text()
    assert forks.run(arguments(folder, few), log=log, kill_at_step=4) == -signal.SIGKILL
    assert len(rows(folder)) == 1
    assert forks.run(["--resume", "--device", "cpu", "--output", str(folder)], log=log) == 0, log.read_text()
    assert "has no checkpoint yet; the run starts again" in log.read_text()
    assert rows(folder) == rows(whole)
