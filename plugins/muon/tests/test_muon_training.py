"""The run spec of the plugin's zoo trains, and a run resumes exactly."""

from __future__ import annotations

import pytest

from implicit_blocks.testing import check_plugin

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


def steps(records: list[dict]) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in records if "gradient_norm" in row]


def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(train, tmp_path):
    whole = steps(train(tmp_path / "whole", "--spec", SPEC, *SMALL))
    assert [step for step, _, _ in whole] == list(range(1, 9))
    train(tmp_path / "parts", "--spec", SPEC, "--stop-at", "4", *SMALL)
    assert steps(train(tmp_path / "parts", "--resume")) == whole


@pytest.mark.slow
def test_training_the_zoo_spec_learns_s3(check_learns_s3):
    check_learns_s3(SPEC)


def test_looking_up_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-muon", ("optimizer", "muon"))
