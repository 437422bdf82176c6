"""Runs in processes of their own, interrupted or killed at some moment: they go on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainer.metrics import read_metrics

SETTINGS = [
    "model.d_model=16", "model.mixer.d_state=8", "model.mixer.head_dim=8", "model.dropout=0.1",
    "training.batch_size=4", "training.threads=1", "training.max_steps=40", "training.checkpoint_every=2",
    "data.length=12", "evaluation.lengths=[12]", "evaluation.sequences=4",
    "model.at_evaluation.stopping.max_iterations=8",
]  # fmt: skip


def command(folder: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "trainer", "--spec", "word_problem_s3", *SETTINGS, "--device", "cpu",
        "--output", str(folder), *options,
    ]  # fmt: skip


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(folder: Path, *options: str) -> None:
    with start(folder, *options) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached: {process.poll()}")


def losses(folder: Path) -> list[tuple[Any, Any, Any]]:
    return [
        (row["step"], row["loss"], row["gradient_norm"]) for row in read_metrics(folder / "metrics.jsonl")
    ]


def test_killed_and_interrupted_it_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    finish(whole)
    with start(folder) as process:
        wait_for_step(folder, 7, process)
        process.kill()  # SIGKILL: nothing can be tidied up

    with start(folder, "--resume") as process:
        wait_for_step(folder, 14, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    stopped = len(losses(folder))
    assert f"stopped after step {stopped}; go on by: --resume --output {folder}" in output
    assert (folder / "checkpoints" / f"step-{stopped:08d}").is_dir()

    with start(folder, "--resume") as process:
        wait_for_step(folder, stopped + 5, process)
        process.kill()
    finish(folder, "--resume")
    assert losses(folder) == losses(whole)
