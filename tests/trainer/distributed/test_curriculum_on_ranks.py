"""Phases with another batch size, and initial weights of another run, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.distributed import scenarios

SPEC: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 1,
        "mixer": {"kind": "attention", "n_heads": 2},
        "stopping": {"tolerance": 0.04, "max_iterations": 8},
        "at_evaluation": {"stopping": {"max_iterations": 4, "tolerance": 0.05}},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 5,
        "batch_size": 4,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
        "threads": 1,
    },
    "phases": [
        {"name": "bounded", "until": "96 tokens", "model": {"stopping": {"max_iterations": 4}}},
        {"name": "free", "training": {"batch_size": 12, "micro_batch_size": 2}},
    ],
    "evaluation": {"lengths": [12], "identity_probabilities": [0.5], "sequences": 4, "batch_size": 2},
}


def varied(**training: Any) -> dict[str, Any]:
    return {**SPEC, "training": {**SPEC["training"], **training}}


def test_losses_are_those_of_one_process(processes: Any, tmp_path: Path) -> None:
    start = {"path": str(tmp_path / "1-first"), "optimizer": True, "position": True}
    scenarios.train(varied(max_steps=3), start["path"])
    rows = scenarios.train(varied(init_from=start), str(tmp_path / "2-next"))["rows"]
    assert [row["samples"] for row in rows] == [24, 28, 40, 52, 64]  # 20 before it
    assert [row["tokens"] for row in rows] == [48, 96, 240, 384, 528]

    layouts = {kind: varied(init_from=start, distributed={"kind": kind}) for kind in ("ddp", "fsdp")}
    two = processes("train_each", runs=layouts, folder=str(tmp_path))[0]
    for name in layouts:
        for row, other in zip(two[name]["rows"], rows, strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-6), name
            assert row["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4), name
            assert (row["samples"], row["tokens"]) == (other["samples"], other["tokens"]), name


def test_a_batch_that_two_processes_cannot_share_is_refused(processes: Any, tmp_path: Path) -> None:
    spec = {**SPEC, "phases": [SPEC["phases"][0], {"name": "free", "training": {"batch_size": 3}}]}
    for kind, words in processes("train_each", runs={"odd": spec}, folder=str(tmp_path)):
        assert kind == "ValueError"
        assert "phase 'free': training.batch_size 3 is not divisible by 2 processes" in words
