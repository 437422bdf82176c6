"""The mixer contracts of the conformance kit, for the dense and the blocked path."""

from __future__ import annotations

import pytest
from implicit_blocks_sliding_window import SlidingWindowAttentionSpec, band

import implicit_blocks as ib
from implicit_blocks.testing import MIXER_CONTRACTS

SPECS = {
    "window1": SlidingWindowAttentionSpec(window=1, n_heads=2),
    "window2": SlidingWindowAttentionSpec(window=2, n_heads=4),
    "window4-grouped": SlidingWindowAttentionSpec(window=4, n_heads=4, n_kv_heads=2, rope_theta=100.0),
    "window8": SlidingWindowAttentionSpec(window=8, n_heads=2, n_kv_heads=1),
    "wider-than-the-sequence": SlidingWindowAttentionSpec(window=100, n_heads=4),
}


@pytest.mark.parametrize("minimum_block", [1, 64], ids=["blocks", "dense"])
@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", SPECS)
def test_the_mixer_satisfies_the_contract(monkeypatch, name, contract, minimum_block):
    monkeypatch.setattr(band, "MINIMUM_BLOCK", minimum_block)
    MIXER_CONTRACTS[contract](SPECS[name])


def test_the_spec_builds_the_plugins_mixer():
    spec = ib.build(SlidingWindowAttentionSpec(window=4, n_heads=2), d_model=8)
    assert type(spec).__name__ == "SlidingWindowAttention"
