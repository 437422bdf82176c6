"""The map called before the flags are read: what is found is the same, and little is called in vain."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search import search as driver

SOLVERS = {"picard": ib.Picard(), "damped": ib.Picard(damping=0.7), "anderson": ib.Anderson(memory=3)}


class Contraction:
    """A map whose rows, or tokens, converge at speeds of their own; it counts its calls."""

    def __init__(self, rate, goal):
        self.rate, self.goal, self.calls = rate, goal, []

    def __call__(self, z):
        self.calls.append(len(z))
        return self.goal + self.rate * (z - self.goal)

    def select_rows(self, rows):
        part = Contraction(self.rate[rows], self.goal[rows])
        part.calls = self.calls
        return part


def found(scope, solver, **options):
    torch.manual_seed(0)
    rate = torch.linspace(0.05, 0.8, 6 * 5).view(6, 5, 1).double()
    if scope == "sequence":
        rate = rate[:, -1:]
    f = Contraction(rate, torch.randn(6, 5, 3, dtype=torch.float64))
    stopping = ib.Stopping(tolerance=1e-5, max_iterations=60, scope=scope)
    search = ib.Search(solver=solver, stopping=stopping, trace=True, **options)
    return search(f, torch.zeros(6, 5, 3, dtype=torch.float64)), f.calls


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_the_answer_is_the_same_however_wrong_the_guess(scope, solver, monkeypatch):
    expected, calls = found(scope, solver)
    monkeypatch.setattr(driver._Loop, "expects_all_active", lambda loop: loop.all_active)
    early, more_calls = found(scope, solver)
    for name in ("z", "iterations", "residual", "converged", "diverged", "trace"):
        torch.testing.assert_close(
            getattr(early, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True, msg=name
        )
    assert len(calls) < len(more_calls)


@pytest.mark.parametrize(
    ("lowest", "expected"),
    [
        ([], False),
        ([1.0], False),  # one residual tells nothing
        ([1.0, 0.8], True),
        ([0.2, 0.16], True),  # 0.128 to come, with a tolerance of 0.05
        ([0.15, 0.12], False),
        ([1.0, 0.3], False),  # a fast one: 0.09 to come
        ([0.0, 1.0], False),
        ([float("inf"), 1.0], False),
    ],
)
def test_residuals_are_expected_to_fall_as_they_did(lowest, expected):
    stopping = ib.Stopping(tolerance=0.05, max_iterations=9)
    loop = driver._Loop(ib.Search(solver=ib.Picard(), stopping=stopping), lambda z: z, torch.ones(2, 3))
    loop.lowest, loop.row_counts = lowest, torch.zeros(3, 2)
    assert loop.expects_all_active() is expected
    loop.all_active = False
    assert not loop.expects_all_active()


@pytest.mark.parametrize(
    ("norm", "tolerance", "expected"),
    [("relative", 0.05, True), ("relative", 0.3, False), ("absolute", 0.05, False)],
)
def test_the_first_call_of_a_search_is_expected_to_leave_much_to_do(norm, tolerance, expected):
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=9, norm=norm)
    loop = driver._Loop(ib.Search(solver=ib.Picard(), stopping=stopping), lambda z: z, torch.ones(2, 3))
    loop.row_counts = torch.zeros(3, 2)
    assert loop.expects_all_active() is expected
    loop.lowest.append(0.2)  # the first residual: it counts beside what it was expected to be
    assert not loop.expects_all_active()


def test_processes_that_agree_on_each_call_make_none_in_vain():
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(), agree=lambda done: done)
    loop = driver._Loop(search, lambda z: z, torch.ones(2, 3))
    loop.lowest, loop.row_counts = [1.0, 0.9], torch.zeros(3, 2)
    assert not loop.expects_all_active()
