"""The run spec of the plugin's zoo trains."""

from __future__ import annotations

import pytest

SPEC = "word_problem_s3_rwkv7"
SMALL = [
    "training.batch_size=16",
    "training.schedule.decay=0.2",
    "model.stopping.max_iterations=8",
    "model.at_evaluation.stopping.max_iterations=16",
    "phases=[]",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[32]",
]


def test_the_loss_falls(check_loss_falls):
    check_loss_falls(SPEC, *SMALL, steps=20, factor=0.99)


@pytest.mark.slow
def test_training_the_zoo_spec_learns_s3(check_learns_s3):
    check_learns_s3(SPEC)
