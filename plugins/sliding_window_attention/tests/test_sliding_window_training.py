"""The run spec of the plugin's zoo trains."""

from __future__ import annotations

SPEC = "word_problem_s3_sliding_window"


def test_the_loss_falls(check_loss_falls):
    check_loss_falls(SPEC, steps=30, factor=0.97)
