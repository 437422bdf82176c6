"""The run spec that the plugin ships, trained by the trainer, which knows the optimizer by its name alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from implicit_blocks.testing import check_plugin
from trainer.cli.train import main

SPEC = "word_problem_s3_muon"
SMALL = [
    "training.batch_size=16",
    "training.max_steps=8",
    "training.schedule.decay=0.2",
    "training.checkpoint_every=4",
    "model.mixer.d_state=8",
    "model.stopping.max_iterations=8",
    "model.at_evaluation.stopping.max_iterations=16",
    "phases=[]",
    "data.seq_len=16",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[16]",
]


def train(output: Path, *arguments: str) -> list[dict]:
    assert main(["--output", str(output), *arguments]) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps(records: list[dict]) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in records if "gradient_norm" in row]


def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path):
    whole = steps(train(tmp_path / "whole", "--spec", SPEC, *SMALL))
    assert [step for step, _, _ in whole] == list(range(1, 9))
    train(tmp_path / "parts", "--spec", SPEC, "--stop-at", "4", *SMALL)
    assert steps(train(tmp_path / "parts", "--resume")) == whole


@pytest.mark.slow
def test_it_learns_s3(tmp_path):
    train(tmp_path / "run", "--spec", SPEC)
    sets = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    reached = {part["set"]: part["accuracy_last"] for part in sets}
    assert reached["p0.5_L32"] >= 0.99


def test_knowing_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-muon", ("optimizer", "muon"))
