"""The run spec that the plugin ships, trained by the trainer, which knows the mixer by its name alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.cli.train import main

SPEC = "word_problem_s3_rwkv7"
SMALL = [
    "training.batch_size=16",
    "training.max_steps=20",
    "training.schedule.decay=0.2",
    "model.stopping.max_iterations=8",
    "model.at_evaluation.stopping.max_iterations=16",
    "phases=[]",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[32]",
]


def train(output: Path, *changes: str) -> list[dict]:
    assert main(["--spec", SPEC, "--output", str(output), *changes]) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls(tmp_path):
    records = train(tmp_path / "run", *SMALL)
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 20
    assert sum(losses[-4:]) < 0.99 * sum(losses[:4])


@pytest.mark.slow
def test_it_learns_s3(tmp_path):
    train(tmp_path / "run")
    sets = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    reached = {part["set"]: part["accuracy_last"] for part in sets}
    assert reached["p0.5_L32"] >= 0.99
