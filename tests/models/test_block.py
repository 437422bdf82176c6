"""The block around a mixer."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib


def test_block_dropout_keeps_the_mean_and_draws_a_mask_per_branch():
    spec = ib.ExplicitLMSpec(vocab_size=5, d_model=16, n_layers=1, mixer=ib.AttentionSpec(n_heads=2))
    (block,) = ib.build(spec).backbone.blocks()
    first, second = block.dropout_masks(torch.ones(64, 16, 16), 0.2)
    for mask in (first, second):
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.8])
        assert float(mask.mean()) == pytest.approx(1.0, abs=0.03)
    assert not torch.equal(first, second)
    assert block.dropout_masks(torch.ones(2, 3, 16), 0.0) is None
