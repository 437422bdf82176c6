"""The run spec of the plugin's zoo trains."""

from __future__ import annotations

import pytest

SPEC = "word_problem_s3_rwkv7"


def test_the_loss_falls(check_loss_falls):
    check_loss_falls(SPEC, steps=20, factor=0.99)


@pytest.mark.slow
def test_training_the_zoo_spec_learns_s3(check_learns_s3):
    check_learns_s3(SPEC)
