"""The number of operators that the loop calls per iteration, besides the map's."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import implicit_blocks as ib

MOST = 20


class Counter(TorchDispatchMode):
    """Counts the operators called between two calls of a map, for each iteration but the last."""

    def __init__(self):
        super().__init__()
        self.counts, self.inside = [], False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if self.counts and not self.inside:
            self.counts[-1] += 1
        return function(*arguments, **(keywords or {}))

    def around(self, f):
        def counted(z):
            self.inside = True
            fz = f(z)
            self.inside = False
            self.counts.append(0)
            return fz

        return counted


def rates(elements_leave):
    """Return contraction rates with which elements leave one after the other, or none leaves."""
    return torch.linspace(0.1, 0.9, 12).view(4, 3, 1) if elements_leave else torch.full((4, 3, 1), 0.9)


@pytest.mark.parametrize("elements_leave", [False, True], ids=["none-leaves", "some-leave"])
@pytest.mark.parametrize("solver", [ib.Picard(), ib.Picard(damping=0.8)], ids=["plain", "damped"])
@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_an_iteration_calls_at_most_20_operators(scope, solver, elements_leave):
    rate = rates(elements_leave)
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=40, scope=scope)
    with Counter() as counter:
        f = counter.around(lambda z: rate * z + torch.linspace(1, 2, 8))
        solution = ib.Search(solver=solver, stopping=stopping, trace=True)(f, torch.zeros(4, 3, 8))
    assert len(counter.counts) > 8
    assert (solution.iterations.unique().numel() > 1) == elements_leave
    of_solver = 1 if solver.damping < 1 else 0
    assert max(counter.counts[:-1]) - of_solver <= MOST
