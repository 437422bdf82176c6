"""The block around a mixer."""

from __future__ import annotations

import pytest
import torch

from implicit_blocks.models.stack import dropout_masks


def test_block_dropout_keeps_the_mean_and_draws_a_mask_per_branch():
    first, second = dropout_masks(torch.ones(64, 16, 16), 0.2)
    for mask in (first, second):
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.8])
        assert float(mask.mean()) == pytest.approx(1.0, abs=0.03)
    assert not torch.equal(first, second)
