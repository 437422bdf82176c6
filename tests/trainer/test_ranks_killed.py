"""Runs of several processes that are killed, stopped, and resumed on another number of processes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.load import read_model_tensors
from trainer.reporting.metrics import read_metrics

SETTINGS = [
    "model.d_model=16", "model.mixer.d_state=8", "model.mixer.head_dim=8", "model.dropout=0.1",
    "training.batch_size=8", "training.threads=1", "training.checkpoint_every=2", "training.max_steps=24",
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


def kill_and_compare(tmp_path: Path, forks: Any, *options: str, kills: int, steps: int) -> None:
    options = (*options, f"training.max_steps={steps}")
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
        assert codes[1 - victim] not in (0, -signal.SIGKILL)  # it ends by itself, and soon
        during_saves += any((folder / "checkpoints").glob("*.tmp-*"))
    assert during_saves > 0
    assert len(rows(folder)) < steps
    assert forks.run_ranks(2, arguments(folder, *options, "--resume"), log=log) == [0, 0], log.read_text()
    assert rows(folder) == rows(whole)


def test_a_run_resumed_after_the_kill_of_one_rank_equals_the_whole(tmp_path: Path, forks: Any) -> None:
    kill_and_compare(tmp_path, forks, kills=4, steps=20)


def test_the_death_of_a_rank_during_a_save_is_reported_by_the_others(tmp_path: Path, forks: Any) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    # The first four events are the two steps of the rank; the next ones are writes of tensors.
    codes = forks.run_ranks(
        2, arguments(folder, "training.max_steps=2"), log=log, orders={1: {"kill_at": 10}}
    )
    assert codes == [1, -signal.SIGKILL]
    message = log.read_text()
    assert "error: another process of the run ended while the checkpoint of step 2 was saved" in message
    assert "there is no checkpoint" in message
    assert "free disk space" not in message
    assert "Traceback" not in message


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_twenty_kills_of_one_of_two_ranks(tmp_path: Path, forks: Any, layout: str) -> None:
    kill_and_compare(tmp_path, forks, f"training.distributed.kind={layout}", kills=20, steps=96)


def test_ranks_with_different_stop_at_are_refused(tmp_path: Path, forks: Any) -> None:
    """Otherwise the surviving rank would wait for the other one forever."""
    folder, log = tmp_path / "run", tmp_path / "log"
    stops = {0: ["--stop-at=1"], 1: ["--stop-at=2"]}
    assert forks.run_ranks(2, arguments(folder), log=log, more=stops) == [2, 2], log.read_text()
    assert "not started with the same spec and options" in log.read_text()
    assert "--stop-at: 1 → 2" in log.read_text()
    assert not folder.exists()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, forks: Any, layout: str) -> None:
    folder, log, kind = tmp_path / "run", tmp_path / "log", f"training.distributed.kind={layout}"
    pids = forks.start_ranks(
        2, arguments(folder, kind, "training.max_steps=400", "training.checkpoint_every=100"), log=log
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(pids[1], signal.SIGUSR1)
    assert forks.wait_for_all(pids) == [75, 75], log.read_text()
    stopped = len(rows(folder))
    assert list_checkpoints(folder / "checkpoints")[-1].name == f"step-{stopped:08d}"
    few = f"training.max_steps={stopped + 2}"
    assert forks.run_ranks(2, arguments(folder, kind, few, "--resume"), log=log) == [0, 0], log.read_text()
    assert len(rows(folder)) == stopped + 2


def test_from_one_rank_to_two_to_four_each_sample_is_seen_once(tmp_path: Path, forks: Any) -> None:
    """The global batches equal those of a run on one rank, so the losses are equal up to rounding."""
    whole, folder, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    same = ("model.dropout=0", "training.max_steps=6")  # dropout would be drawn anew by other ranks
    assert forks.run(arguments(whole, *same), log=log) == 0, log.read_text()
    seen = [tmp_path / f"seen{number}" for number in range(3)]
    for number, (count, layout, stop) in enumerate([(1, "auto", 2), (2, "fsdp", 4), (4, "fsdp", 6)]):
        options = [*same, f"training.distributed.kind={layout}", f"--stop-at={stop}"]
        resume = ["--resume"] if number else []
        orders = {rank: {"samples": f"{seen[number]}-{rank}"} for rank in range(count)}
        codes = forks.run_ranks(count, arguments(folder, *options, *resume), log=log, orders=orders)
        assert codes == [0] * count, log.read_text()
    positions = [int(position) for file in tmp_path.glob("seen*") for position in file.read_text().split()]
    assert sorted(positions) == list(range(6 * 8))
    for once, again in zip(rows(whole), rows(folder), strict=True):
        assert once[2] == pytest.approx(again[2], rel=1e-5)
        assert once[-1] == again[-1]
    ends = [read_model_tensors(list_checkpoints(run / "checkpoints")[-1]) for run in (whole, folder)]
    for name, tensor in ends[0].items():
        assert (tensor - ends[1][name]).abs().max() < 1e-4, name


def test_a_growing_batch_continues_at_the_same_sample_on_another_number_of_ranks(
    tmp_path: Path, forks: Any
) -> None:
    growing = [
        "phases.unrolled.until=192 tokens", "phases.free.training.batch_size=12", "training.max_steps=5",
        "model.dropout=0", "training.loader_threads=2",
    ]  # fmt: skip
    whole, log = tmp_path / "whole", tmp_path / "log"
    assert forks.run(arguments(whole, *growing), log=log) == 0, log.read_text()
    for stop in (1, 3):  # in the first phase, and in the second
        folder = tmp_path / str(stop)
        assert forks.run(arguments(folder, *growing, "--stop-at", str(stop)), log=log) == 0, log.read_text()
        codes = forks.run_ranks(2, arguments(folder, *growing, "--resume"), log=log)
        assert codes == [0, 0], log.read_text()
        for path in (whole, folder):
            seen = [(row["samples"], row["tokens"]) for row in read_metrics(path / "metrics.jsonl")]
            assert seen == [(8, 96), (16, 192), (28, 336), (40, 480), (52, 624)]
        for row, other in zip(rows(folder), rows(whole), strict=True):
            assert row[2] == pytest.approx(other[2], abs=1e-6)
