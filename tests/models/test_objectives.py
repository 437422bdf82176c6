"""The losses of learned exits: rows with different numbers of loops, saturated gates, and no labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.loops import LoopCounts

OBJECTIVES: dict[str, dict[str, Any]] = {
    "until_error": {},
    "iterates": {"at": [1, 2, "last"]},
    "exit_mixture": {},
    "exit_expectation": {"entropy_weight": 0.3},
}
EXITS = ["exit_mixture", "exit_expectation"]


def built(objective: str, **changes: Any) -> ib.ImplicitLM:
    torch.manual_seed(0)
    spec = {
        "vocab_size": 7,
        "d_model": 16,
        "n_layers": 1,
        "mixer": {"kind": "attention", "n_heads": 2},
        "injection": {"kind": "residual"},
        "depth": {"kind": "fixed", "loops": 4},
        "gradient": {"kind": "last_loops"},
        "exit_gate": True,
        "objective": {"kind": objective, **OBJECTIVES[objective]},
    }
    return ib.build(ib.ImplicitLMSpec.model_validate(spec | changes)).train()


def loss_and_gradient(model: ib.ImplicitLM, ids: torch.Tensor, loops: torch.Tensor) -> list[torch.Tensor]:
    loss = model(ids, labels=(ids + 1) % 7, loops=LoopCounts(loops)).loss
    return [loss.detach(), *torch.autograd.grad(loss, model.exit_gate.parameters(), materialize_grads=True)]


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("objective", EXITS)
def test_the_loss_of_a_row_does_not_depend_on_the_loops_of_other_rows(objective, scope):
    model = built(objective, stopping={"scope": scope}).double()
    ids, loops = torch.randint(7, (3, 5)), torch.tensor([1, 4, 2])
    rows = [loss_and_gradient(model, ids[row : row + 1], loops[row : row + 1]) for row in range(3)]
    assert not rows[0][1].any()  # with one loop there is no choice
    expected = [torch.stack(values).mean(0) for values in zip(*rows, strict=True)]
    torch.testing.assert_close(loss_and_gradient(model, ids, loops), expected)


@pytest.mark.parametrize("bias", [20.0, -120.0])
@pytest.mark.parametrize("objective", EXITS)
def test_a_saturated_gate_has_finite_gradients(objective, bias):
    model = built(objective)
    torch.nn.init.constant_(model.exit_gate.bias, bias)
    ids = torch.randint(7, (2, 5))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_without_labels_is_0(objective):
    ids = torch.randint(7, (2, 5))
    assert float(built(objective)(ids, labels=torch.full_like(ids, -100)).loss.detach()) == 0
