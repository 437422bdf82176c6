"""A budget of iterations: the mean stays at the target, whatever the model and the first tolerance."""

from __future__ import annotations

import math

import pytest
import torch

import implicit_blocks as ib


def small_model() -> ib.ImplicitLM:
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(
        vocab_size=61,
        d_model=32,
        n_layers=2,
        mixer=ib.AttentionSpec(n_heads=2),
        mlp=ib.SwiGLUSpec(d_ff=64),
        at_evaluation={"stopping": {"max_iterations": 64}},
    )
    return ib.build(spec).eval()


def tolerances(model: ib.ImplicitLM, budget: ib.IterationBudget, calls: int = 16) -> list[float]:
    numbers, found = torch.Generator().manual_seed(1), []
    for _ in range(calls):
        ids = torch.randint(61, (8, 16), generator=numbers)
        with torch.no_grad():
            found.append(budget.tolerance)
            budget.record(model(ids, tolerance=budget.tolerance).solution)
    return found


@pytest.mark.parametrize(("target", "first"), [(6, 0.5), (8, 0.05), (12, 0.05)])
def test_the_mean_is_within_5_percent_of_the_target(target, first):
    budget = ib.IterationBudget(target, tolerance=first)
    tolerances(small_model(), budget)
    assert budget.mean == pytest.approx(target, rel=0.05)


def test_the_same_calls_give_the_same_tolerances():
    model = small_model()
    first, again = (tolerances(model, ib.IterationBudget(8), calls=5) for _ in range(2))
    assert first == again
    assert len(set(first)) > 1


def test_a_target_above_the_limit_ends_at_the_tightest_tolerance_and_the_mean_says_so():
    budget = ib.IterationBudget(1000)
    tolerances(small_model(), budget, calls=8)
    assert budget.tolerance == 1e-6
    assert budget.mean <= 64


def test_a_call_without_sequences_changes_nothing():
    budget = ib.IterationBudget(8)
    none = torch.zeros(0)
    budget.record(
        ib.Solution(z=none, iterations=none.long(), residual=none, converged=none > 0, diverged=none > 0)
    )
    assert budget.tolerance == 0.05
    assert math.isnan(budget.mean)


@pytest.mark.parametrize("target", [0, 0.9, -3, math.inf, math.nan])
def test_targets_that_no_search_has_are_refused(target):
    with pytest.raises(ValueError, match="mean_iterations must be at least 1"):
        ib.IterationBudget(target)


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1.0, math.nan])
def test_tolerances_that_cannot_be_adjusted_are_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must be in"):
        ib.IterationBudget(8, tolerance=tolerance)
