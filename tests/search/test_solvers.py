"""Solvers in a search: fixed points of contractions, iterations saved, options out of range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import implicit_blocks as ib
from implicit_blocks.testing.solvers import contraction


def search(*, solver=None, **stopping) -> ib.Search:
    return ib.Search(solver=solver or ib.Picard(), stopping=ib.Stopping(**stopping))


@given(
    rate=st.floats(0.0, 0.95), seed=st.integers(0, 1000), rows=st.integers(1, 4), features=st.integers(1, 10)
)
@settings(max_examples=40)
@pytest.mark.parametrize(
    "solver",
    [
        ib.Picard(),
        ib.Picard(damping=0.6),
        ib.Anderson(),
        ib.Anderson(memory=1),
        ib.Broyden(),
        ib.Broyden(memory=2),
    ],
)
def test_solvers_find_the_fixed_points_of_random_contractions(solver, rate, seed, rows, features):
    f, expected = contraction(rate, rows=rows, features=features, seed=seed)
    solution = search(solver=solver, tolerance=1e-10, max_iterations=3000)(f, torch.zeros_like(expected))
    assert solution.converged.all()
    torch.testing.assert_close(solution.z, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("linear", [True, False], ids=["linear", "nonlinear"])
def test_anderson_saves_iterations_on_a_stiff_contraction(dtype, linear):
    """It must save at least 30 % of Picard's iterations, and saves far more here."""
    affine, _ = contraction(0.98, features=40, dtype=dtype)
    f = affine if linear else lambda z: torch.tanh(0.5 * affine(z)) * 2
    z0, tolerance = torch.zeros(4, 40, dtype=dtype), 1e-5
    picard = search(tolerance=tolerance, max_iterations=3000)(f, z0)
    anderson = search(solver=ib.Anderson(), tolerance=tolerance, max_iterations=3000)(f, z0)
    assert picard.converged.all()
    assert anderson.converged.all()
    print(picard.iterations, anderson.iterations)
    assert (anderson.iterations <= 0.7 * picard.iterations).all()


def test_anderson_falls_back_to_the_last_accepted_value():
    """If an extrapolated point is worse, the next call is at the last accepted f(z)."""
    points = []

    def f(z):
        points.append(z.clone())
        return torch.where(z > 1, -3.0 * z, 0.9 * z + 0.2)

    search(solver=ib.Anderson(memory=2), tolerance=0.0, max_iterations=8)(f, torch.zeros(1, 1))
    values = [0.2 + 0.9 * float(p) if float(p) <= 1 else -3.0 * float(p) for p in points]
    residuals = [abs(v - float(p)) for v, p in zip(values, points, strict=True)]
    accepted, rejected = 0, 0
    for k in range(1, len(points) - 1):
        if residuals[k] > residuals[accepted] and abs(float(points[k]) - values[k - 1]) > 1e-6:
            rejected += 1
            assert float(points[k + 1]) == pytest.approx(values[accepted], rel=1e-5)
        else:
            accepted = k
    assert rejected > 0


def test_anderson_at_the_fixed_point_stays_finite():
    solution = search(solver=ib.Anderson(), tolerance=0.0, max_iterations=12)(
        lambda z: torch.ones_like(z), torch.ones(2, 3)
    )
    assert torch.equal(solution.z, torch.ones(2, 3))
    zero = search(solver=ib.Anderson(), tolerance=-0.0, max_iterations=12)(torch.zeros_like, torch.ones(2, 3))
    assert torch.equal(zero.z, torch.zeros(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ib.Picard(damping=0.0),
        lambda: ib.Picard(damping=1.1),
        lambda: ib.Anderson(memory=0),
        lambda: ib.Anderson(damping=2.0),
        lambda: ib.Anderson(regularization=-1.0),
        lambda: ib.Broyden(memory=0),
        lambda: ib.JacobianPenalty(weight=0.0),
        lambda: ib.JacobianPenalty(probes=0),
        lambda: ib.JacobianPenalty(step=-1.0),
        lambda: ib.Phantom(steps=0),
        lambda: ib.Phantom(damping=0.0),
        lambda: ib.Unrolled(steps=0),
        lambda: ib.ImplicitFunction(stopping=ib.Stopping(scope="prefix")),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"choose|give|must be"):
        make()
