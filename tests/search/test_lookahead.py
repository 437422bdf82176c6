"""Look-ahead: a call of the map before the status is known changes no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.policies import expects_all_active

SOLVERS = {"picard": ib.Picard(), "damped": ib.Picard(damping=0.7), "anderson": ib.Anderson(memory=3)}


class Contraction:
    """A map whose rows, or tokens, converge at different rates; it counts its calls."""

    def __init__(self, rate, goal):
        self.rate, self.goal, self.calls = rate, goal, []

    def __call__(self, z):
        self.calls.append(len(z))
        return self.goal + self.rate * (z - self.goal)

    def select_rows(self, rows):
        part = Contraction(self.rate[rows], self.goal[rows])
        part.calls = self.calls
        return part


def always(lowest, stopping):
    """Launch the next call early whenever all elements are active."""
    return True


def search(scope, solver, **options):
    """Return a solution and the sizes of the batches that the map was called with."""
    torch.manual_seed(0)
    rate = torch.linspace(0.05, 0.8, 6 * 5).view(6, 5, 1).double()
    if scope == "sequence":
        rate = rate[:, -1:]
    f = Contraction(rate, torch.randn(6, 5, 3, dtype=torch.float64))
    stopping = ib.Stopping(tolerance=1e-5, max_iterations=60, scope=scope)
    find = ib.Search(solver=solver, stopping=stopping, trace=True, **options)
    return find(f, torch.zeros(6, 5, 3, dtype=torch.float64)), f.calls


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_a_call_in_vain_changes_no_result(scope, solver):
    expected, calls = search(scope, solver)
    early, more_calls = search(scope, solver, lookahead=always)
    for name in ("z", "iterations", "residual", "converged", "diverged", "trace"):
        torch.testing.assert_close(
            getattr(early, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True, msg=name
        )
    assert len(calls) <= len(more_calls)
    assert scope == "sequence" or len(calls) < len(more_calls)  # tokens see those that are done


def with_and_without(rate, *, max_iterations):
    """Return two maps with equal values and their solutions, the second with every call launched ahead."""
    find = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(tolerance=1e-5, max_iterations=max_iterations))
    f, early = (Contraction(rate, torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))
    expected = find(f, torch.zeros(4, 3, dtype=torch.float64))
    found = replace(find, lookahead=always)(early, torch.zeros(4, 3, dtype=torch.float64))
    return f, early, expected, found


def test_a_call_of_all_rows_is_used_although_one_is_done():
    rate = torch.tensor([0.1, 0.8, 0.8, 0.9], dtype=torch.float64).view(4, 1)
    f, early, expected, found = with_and_without(rate, max_iterations=20)
    assert early.calls == f.calls == [4] * 20
    assert torch.equal(found.z, expected.z)
    assert torch.equal(found.iterations, expected.iterations)
    assert expected.iterations[0] < expected.iterations[1]


def test_a_call_of_all_rows_serves_those_that_stay_when_half_leave():
    rate = torch.tensor([0.1, 0.1, 0.1, 0.9], dtype=torch.float64).view(4, 1)
    f, early, expected, found = with_and_without(rate, max_iterations=200)
    assert f.calls[-1] == 1
    assert early.calls.count(4) == f.calls.count(4) + 1
    assert len(early.calls) == len(f.calls) + 1  # at the end
    assert torch.equal(found.z, expected.z)
    assert torch.equal(found.iterations, expected.iterations)


def test_processes_that_agree_on_each_call_make_none_in_vain():
    _, calls = search("sequence", ib.Picard())
    _, agreed = search("sequence", ib.Picard(), lookahead=always, agree=lambda done: done)
    assert agreed == calls


@pytest.mark.parametrize(
    ("lowest", "expected"),
    [
        ([], False),
        ([1.0], False),  # one residual gives no factor
        ([1.0, 0.8], True),
        ([0.2, 0.16], True),  # 0.128 is expected next, with a tolerance of 0.05
        ([0.15, 0.12], False),
        ([1.0, 0.3], False),  # fast: 0.09 is expected next
        ([0.0, 1.0], False),
        ([float("inf"), 1.0], False),
    ],
)
def test_residuals_are_expected_to_fall_by_their_last_factor(lowest, expected):
    stopping = ib.Stopping(tolerance=0.05, max_iterations=9, norm="absolute")
    assert expects_all_active(lowest, stopping) is expected


@pytest.mark.parametrize(
    ("norm", "tolerance", "expected"),
    [("relative", 0.05, True), ("relative", 0.3, False), ("absolute", 0.05, False)],
)
def test_a_relative_residual_of_1_is_expected_of_the_first_call(norm, tolerance, expected):
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=9, norm=norm)
    assert expects_all_active([], stopping) is expected
    assert not expects_all_active([0.2], stopping)  # compared with the 1 that was expected
