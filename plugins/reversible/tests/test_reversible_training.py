"""The run spec of the plugin's zoo trains, and the metrics contain the reconstruction error."""

from __future__ import annotations

import pytest

from implicit_blocks.testing import check_plugin

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
    "evaluation.lengths=[16]",
]


def test_the_loss_falls_and_the_metrics_contain_the_error(train, tmp_path):
    records = [
        row
        for row in train(tmp_path / "run", "--spec", SPEC, *SMALL, "data.seq_len=16")
        if "gradient_norm" in row
    ]
    assert len(records) == 20
    assert {row["phase"] for row in records} == {"from_start", "free"}
    assert sum(row["loss"] for row in records[-4:]) < 0.995 * sum(row["loss"] for row in records[:4])
    errors = [row["adjoint_residual_max"] for row in records]
    assert all(error < 1e-4 for error in errors)
    assert {row["adjoint_iterations"] for row in records} == {10.0, 6.0}


@pytest.mark.slow
def test_training_the_zoo_spec_learns_s3(check_learns_s3):
    check_learns_s3(SPEC)


def test_looking_up_the_kinds_imports_no_torch():
    check_plugin("implicit-blocks-reversible", ("solver", "reversible"), ("gradient", "reversible"))
