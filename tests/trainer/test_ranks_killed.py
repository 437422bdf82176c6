"""Runs of several processes: killed, told to stop, and resumed on another number of them."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

from trainer.metrics import read_metrics

SETTINGS = [
    "model.d_model=16", "model.mixer.d_state=8", "model.mixer.head_dim=8", "model.dropout=0.1",
    "training.batch_size=8", "training.threads=1", "training.checkpoint_every=2", "training.max_steps=24",
    "data.length=12", "evaluation.lengths=[12]", "evaluation.sequences=4", "evaluation.batch_size=4",
    "model.stopping.max_iterations=5", "model.at_evaluation.stopping.max_iterations=4",
]  # fmt: skip


def arguments(folder: Path, *options: str) -> list[str]:
    return [
        "--spec", "word_problem_s3", *SETTINGS, "--device", "cpu", "--output", str(folder), *options
    ]  # fmt: skip


def rows(folder: Path) -> list[tuple[Any, ...]]:
    kept = ("step", "phase", "loss", "gradient_norm", "learning_rate", "residual", "accuracy", "tokens")
    return [tuple(row[key] for key in kept) for row in read_metrics(folder / "metrics.jsonl")]


def kill_and_compare(tmp_path: Path, forks: Any, *options: str, kills: int) -> None:
    whole, folder, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    assert forks.run_ranks(2, arguments(whole, *options), log=log) == [0, 0], log.read_text()
    draw = random.Random(1)
    during_saves = 0
    for number in range(kills):
        resume = ["--resume"] if (folder / "spec.yaml").exists() else []
        kill = {"kill_at": draw.randrange(1, 400)} if number % 2 else {"kill_at_step": draw.randrange(1, 14)}
        victim = draw.randrange(2)
        codes = forks.run_ranks(2, arguments(folder, *options, *resume), log=log, orders={victim: kill})
        assert codes[victim] == -signal.SIGKILL, f"{codes} after {number} kills:\n{log.read_text()[-3000:]}"
        assert codes[1 - victim] != 0
        during_saves += any((folder / "checkpoints").glob("*.tmp-*"))
    assert during_saves > 0
    assert len(rows(folder)) < 24
    assert forks.run_ranks(2, arguments(folder, *options, "--resume"), log=log) == [0, 0], log.read_text()
    assert rows(folder) == rows(whole)


def test_one_of_two_ranks_killed_it_goes_on_to_the_last_bit(tmp_path: Path, forks: Any) -> None:
    kill_and_compare(tmp_path, forks, kills=5)
