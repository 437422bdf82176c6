"""The built-in mixers and solvers hold the contracts that everyone's must."""

from __future__ import annotations

import pytest

import implicit_blocks as ib
from implicit_blocks.testing import MIXER_CONTRACTS, SOLVER_CONTRACTS

MIXERS = {
    "mamba2": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4),
    "mamba2-one-chunk": ib.Mamba2Spec(d_state=4, expand=1, head_dim=4, chunk_size=64),
    "mamba2-groups": ib.Mamba2Spec(
        d_state=4, head_dim=4, n_groups=2, bias=True, conv_bias=False, chunk_size=4
    ),
    "attention": ib.AttentionSpec(n_heads=4),
    "attention-grouped": ib.AttentionSpec(n_heads=4, n_kv_heads=2, rope_theta=100.0),
    "attention-llama3": ib.AttentionSpec(
        n_heads=2, head_dim=6, bias=True, rope_scaling={"rope_type": "llama3", "factor": 4.0}
    ),
    "attention-one-kv": ib.AttentionSpec(n_heads=2, n_kv_heads=1),
}
SOLVERS = {
    "picard": ib.Picard(),
    "picard-damped": ib.Picard(damping=0.7),
    "picard-undamped-first": ib.Picard(damping=0.7, undamped_first=True),
    "anderson": ib.Anderson(),
    "anderson-1": ib.Anderson(memory=1),
    "anderson-damped": ib.Anderson(memory=3, damping=0.8),
}


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", MIXERS)
def test_mixer(name, contract):
    MIXER_CONTRACTS[contract](MIXERS[name])


@pytest.mark.parametrize("contract", SOLVER_CONTRACTS)
@pytest.mark.parametrize("name", SOLVERS)
def test_solver(name, contract):
    SOLVER_CONTRACTS[contract](SOLVERS[name])
