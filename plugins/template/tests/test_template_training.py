"""A short training run with the plugin's run spec; the trainer finds the mixer by its kind."""

from __future__ import annotations

import json

from implicit_blocks.testing import check_plugin
from trainer.cli.train import main

DISTRIBUTION = "implicit-blocks-template"
KIND = ("mixer", "template")
SPEC = "word_problem_s3_template"
SMALL = [
    "training.max_steps=30",
    "training.batch_size=16",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[16]",
]


def test_training_decreases_the_loss(tmp_path):
    output = tmp_path / "run"
    assert main(["--spec", SPEC, "--output", str(output), *SMALL, "data.seq_len=16"]) == 0
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 30
    assert sum(losses[-4:]) < 0.98 * sum(losses[:4])


def test_registering_the_kind_imports_no_torch():
    check_plugin(DISTRIBUTION, KIND)
