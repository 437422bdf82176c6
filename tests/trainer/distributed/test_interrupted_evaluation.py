"""A signal stops an evaluation before its next batch, and the resumed run repeats the evaluation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.reporting.metrics import read_metrics
from trainer.run.build import build

CHANGES = {
    "training.evaluate_every": 2,
    "training.checkpoint_every": 4,
    "evaluation.sequences": 6,
    "evaluation.batch_size": 1,
    "model.at_evaluation.stopping.max_iterations": 3,
}


def left(folder: Path) -> Any:
    """Return what a run wrote that doesn't depend on the clock."""
    kept = ("step", "set", "loss", "accuracy", "iterations", "residual")
    file = folder / "evaluations.jsonl"
    rows = [{key: row.get(key) for key in kept} for row in (read_metrics(file) if file.exists() else ())]
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")], rows


@pytest.mark.parametrize("at", [2, 4], ids=["on the way", "at the end"])
def test_an_interrupted_evaluation_stops_before_the_next_batch(
    small: Callable[..., Any], tmp_path: Path, at: int
) -> None:
    whole = build(small(CHANGES), output=tmp_path / "whole", device="cpu")
    whole.train()
    run = build(small(CHANGES), output=tmp_path / "run", device="cpu")
    calls: list[int] = []

    def watch(module: Any, *_: Any) -> None:
        if not module.training:
            calls.append(run.loop.progress.step)
            if calls.count(at) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    run.model.register_forward_pre_hook(watch)
    assert run.train() is None
    assert run.loop.stopped_by == signal.SIGTERM
    assert run.loop.progress.step == at
    assert calls.count(at) == 3
    assert run.model.training
    assert (tmp_path / "run" / "checkpoints" / f"step-{at:08d}").is_dir()
    assert {row["step"] for row in left(tmp_path / "run")[1]} == ({2} if at == 4 else set())

    again = build(small(CHANGES), output=tmp_path / "run", device="cpu", resume=True)
    assert again.train() is not None
    assert left(tmp_path / "run") == left(tmp_path / "whole")


def test_a_complete_evaluation_is_not_repeated(small: Callable[..., Any], tmp_path: Path) -> None:
    build(small(CHANGES), output=tmp_path / "whole", device="cpu").train()
    build(small(CHANGES), output=tmp_path / "run", device="cpu").train(stop_at=2)
    assert {row["step"] for row in left(tmp_path / "run")[1]} == {2}
    build(small(CHANGES), output=tmp_path / "run", device="cpu", resume=True).train()
    assert left(tmp_path / "run") == left(tmp_path / "whole")


def test_all_ranks_stop_an_evaluation_together(
    small: Callable[..., Any], processes: Any, tmp_path: Path
) -> None:
    # Five sequences: the last rank has fewer batches than the first.
    spec = small({**CHANGES, "evaluation.sequences": 5}).model_dump(mode="json")
    found = processes("interrupt_evaluation", spec=spec, folder=str(tmp_path / "run"), at=2)
    assert found == [{"finished": False, "signal": signal.SIGTERM, "step": 2, "calls": 1}] * 2
    whole = processes("interrupt_evaluation", spec=spec, folder=str(tmp_path / "whole"), at=9)
    assert [rank["finished"] for rank in whole] == [True, True]
