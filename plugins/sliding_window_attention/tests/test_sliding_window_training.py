"""The run spec of the plugin's zoo trains."""

from __future__ import annotations

SPEC = "word_problem_s3_sliding_window"
SMALL = [
    "training.batch_size=16",
    "training.schedule.decay=0.2",
    "evaluation.sequences=16",
    "evaluation.batch_size=16",
    "evaluation.lengths=[32]",
]


def test_the_loss_falls(check_loss_falls):
    check_loss_falls(SPEC, *SMALL, steps=30, factor=0.97)
