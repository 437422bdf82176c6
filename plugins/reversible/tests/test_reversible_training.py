"""The run spec that the plugin ships, trained by the trainer, which knows both kinds by their names alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from implicit_blocks.testing import check_plugin
from trainer.cli.train import main

SPEC = "word_problem_s3_reversible"
SMALL = [
    "training.batch_size=16",
    "training.max_steps=20",
    "training.schedule.decay=0.2",
    "model.d_model=32",
    "model.mixer.d_state=8",
    "model.solver.kind=reversible",
    "model.stopping.max_iterations=8",
    "model.at_evaluation.stopping.max_iterations=16",
    "phases.free.model.stopping.max_iterations=8",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[32]",
]


def train(output: Path, *changes: str) -> list[dict]:
    assert main(["--spec", SPEC, "--output", str(output), *changes]) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_error_is_in_the_metrics(tmp_path):
    records = [row for row in train(tmp_path / "run", *SMALL) if "gradient_norm" in row]
    assert len(records) == 20
    assert {row["phase"] for row in records} == {"from_start", "free"}
    assert sum(row["loss"] for row in records[-4:]) < 0.995 * sum(row["loss"] for row in records[:4])
    errors = [row["adjoint_residual_max"] for row in records]
    assert all(error < 1e-4 for error in errors)
    assert {row["adjoint_iterations"] for row in records} == {10.0, 6.0}


@pytest.mark.slow
def test_it_learns_s3(tmp_path):
    train(tmp_path / "run")
    sets = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    reached = {part["set"]: part["accuracy_last"] for part in sets}
    assert reached["p0.5_L32"] >= 0.99


def test_knowing_the_kinds_imports_no_torch():
    check_plugin("implicit-blocks-reversible", ("solver", "reversible"), ("gradient", "reversible"))
