"""The run spec that the plugin ships, trained by the trainer, which knows the mixer by its name alone."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.cli.train import main

SPEC = "word_problem_s3_sliding_window"
SMALL = [
    "training.batch_size=16",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[32]",
]


def train(output: Path, *changes: str) -> list[dict]:
    assert main(["--spec", SPEC, "--output", str(output), *SMALL, *changes]) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls(tmp_path):
    records = train(tmp_path / "run", "training.max_steps=30", "training.schedule.decay=0.2")
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 30
    assert sum(losses[-4:]) < 0.97 * sum(losses[:4])
