"""The built-in mixers, solvers and gradient estimators satisfy the contracts of the conformance kit."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.testing import (
    CUTS,
    GRADIENT_CONTRACTS,
    MIXER_CONTRACTS,
    PADDINGS,
    SOLVER_CONTRACTS,
    check_walk,
)

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
    "hybrid": ib.HybridSpec(
        mixers=(ib.AttentionSpec(n_heads=2), ib.Mamba2Spec(d_state=4, head_dim=8, chunk_size=4))
    ),
}
SOLVERS = {
    "picard": ib.PicardSpec(),
    "picard-damped": ib.PicardSpec(damping=0.7),
    "picard-undamped-first": ib.PicardSpec(damping=0.7, undamped_first=True),
    "anderson": ib.AndersonSpec(),
    "anderson-1": ib.AndersonSpec(memory=1),
    "anderson-damped": ib.AndersonSpec(memory=3, damping=0.8),
    "broyden": ib.BroydenSpec(),
    "broyden-1": ib.BroydenSpec(memory=1),
}


def neumann(steps: int, damping: float):
    """Return the phantom gradient's replacement of ``(I − J)^{-1}``."""

    def oracle(jacobian_FF):
        step = damping * jacobian_FF + (1 - damping) * torch.eye(
            jacobian_FF.shape[0], dtype=jacobian_FF.dtype
        )
        return damping * sum(torch.linalg.matrix_power(step, i) for i in range(steps))

    return oracle


EXACTLY = ib.Stopping(tolerance=1e-13, max_iterations=500)
GRADIENTS = {
    "phantom": (ib.PhantomSpec(), neumann(4, 0.8)),
    "jacobian-free": (ib.PhantomSpec(steps=1, damping=1.0), neumann(1, 1.0)),
    "implicit-function": (ib.ImplicitFunctionSpec(stopping=EXACTLY), "implicit"),
    "implicit-function-anderson": (
        ib.ImplicitFunctionSpec(solver=ib.AndersonSpec(), stopping=EXACTLY),
        "implicit",
    ),
    "jacobian-penalty": (ib.JacobianPenaltySpec(gradient=ib.PhantomSpec()), neumann(4, 0.8)),
    "unrolled": (ib.UnrolledSpec(steps=3), "computation"),
    "unrolled-checkpointed": (ib.UnrolledSpec(steps=3, checkpointing=True), "computation"),
}


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_satisfies_the_contract(name, contract):
    MIXER_CONTRACTS[contract](MIXERS[name])


@pytest.mark.parametrize("documents", [False, True], ids=["one-document", "documents"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_and_batch_mates_do_not_change_a_row(padding, cuts, documents):
    check_walk(MIXERS["mamba2"], padding=padding, cuts=cuts, documents=documents)


@pytest.mark.parametrize("contract", SOLVER_CONTRACTS)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_satisfies_the_contract(name, contract):
    SOLVER_CONTRACTS[contract](SOLVERS[name])


SLOW = [  # starts two processes; one exact and one biased estimator suffice for the fast suite
    pytest.param(name, "ddp", marks=pytest.mark.slow)
    for name in GRADIENTS
    if name not in ("phantom", "implicit-function")
]
FAST = [
    (name, contract)
    for name in GRADIENTS
    for contract in GRADIENT_CONTRACTS
    if contract != "ddp" or name in ("phantom", "implicit-function")
]


@pytest.mark.parametrize(("name", "contract"), [*FAST, *SLOW])
def test_a_gradient_satisfies_the_contract(name, contract):
    spec, oracle = GRADIENTS[name]
    GRADIENT_CONTRACTS[contract](spec, oracle=oracle)
