"""Chebyshev's cycle of dampings: its roots, its rate, its state, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.solvers.chebyshev import chebyshev_dampings
from implicit_blocks.testing import check_solver


def test_chebyshev_satisfies_the_solver_contract():
    check_solver(ib.Chebyshev(lowest=-0.9, highest=0.9, cycle=3))


@pytest.mark.parametrize("cycle", [1, 2, 3, 5])
def test_the_dampings_of_a_cycle_are_the_roots_of_the_polynomial(cycle):
    """On the bounds' interval no factor of the error is above 1 / T_n of its centre, which is attained."""
    lowest, highest = -0.95, 0.8
    eigenvalues = np.linspace(lowest, highest, 2001)
    dampings = chebyshev_dampings(lowest, highest, cycle)
    factor = np.abs(np.prod([1 - damping * (1 - eigenvalues) for damping in dampings], axis=0)).max()
    centre = (2 - lowest - highest) / (highest - lowest)
    assert factor == pytest.approx(1 / np.cosh(cycle * np.arccosh(centre)), rel=1e-4)


def test_one_damping_is_the_best_of_picard():
    assert chebyshev_dampings(-0.5, 0.5, 1) == pytest.approx((1.0,))
    assert chebyshev_dampings(-0.9, 0.1, 1) == pytest.approx((1 / 1.4,))


def test_a_cycle_needs_fewer_iterations_than_any_damping_where_both_ends_are_slow():
    eigenvalues = torch.linspace(-0.95, 0.8, 16, dtype=torch.float64)

    def f(z):
        return eigenvalues * (z - 1) + 1

    z0 = torch.zeros(2, 16, dtype=torch.float64)
    stopping = ib.Stopping(tolerance=1e-6, max_iterations=200)

    def iterations(solver):
        found = ib.Search(solver=solver, stopping=stopping)(f, z0)
        assert found.converged.all()
        torch.testing.assert_close(found.z, torch.ones_like(z0), atol=1e-4, rtol=0)
        return int(found.iterations.max())

    best = min(iterations(ib.Picard(damping=damping)) for damping in (0.5, 0.65, 0.8, 0.93))
    assert iterations(ib.Chebyshev(cycle=2)) < 0.75 * best
    assert iterations(ib.Chebyshev(cycle=3)) < 0.6 * best


def test_each_element_has_its_own_place_in_the_cycle():
    solver = ib.Chebyshev(cycle=2)
    z, state = torch.zeros(2, 1), torch.tensor([0, 1], dtype=torch.uint8)
    found, following = solver.update(z, z + 1, state, lambda z: z)
    assert found[:, 0].tolist() == pytest.approx(solver.dampings)
    assert following.tolist() == [1, 0]
    assert ib.ChebyshevSpec().state_bytes(5, itemsize=4) == 1


@pytest.mark.parametrize(
    "wrong", [{"lowest": 0.9}, {"highest": 1.0}, {"cycle": 0}, {"lowest": -0.5, "highest": -0.6}]
)
def test_bounds_and_cycles_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ib.Chebyshev(**wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ib.ChebyshevSpec(**wrong)
