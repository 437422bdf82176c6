"""Each update rule against its formula, written out in NumPy for one element."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.testing.solvers import contraction


def points_of(solver: ib.Solver, f, z: torch.Tensor, count: int) -> list[torch.Tensor]:
    state, points = solver.init(z), [z]
    for _ in range(count):
        z, state = solver.update(z, f(z), state, f)
        points.append(z)
    return points


@pytest.mark.parametrize("regularization", [0.0, 1e-2])
@pytest.mark.parametrize("damping", [1.0, 0.6])
def test_anderson_is_its_formula(damping, regularization):
    """γ = argmin ‖g_k + Σ γ_j (g_j − g_k)‖² + ρ ‖γ‖²; then a damped step along the mixed g."""
    memory = 3
    f, expected = contraction(0.7, rows=2, features=6)
    solver = ib.Anderson(memory=memory, damping=damping, regularization=regularization)
    points = points_of(solver, f, torch.zeros_like(expected), 7)
    for row in range(2):
        past: list[tuple[np.ndarray, np.ndarray]] = []  # f(z) and g, newest last
        for number, (at, following) in enumerate(pairwise(points)):
            value = f(at)[row].numpy()
            g = value - at[row].numpy()
            gamma = np.zeros(len(past))
            if past:
                differences = np.stack([old - g for _, old in past])
                gram = differences @ differences.T
                ridge = regularization * np.trace(gram) / len(past)
                gamma = np.linalg.solve(gram + ridge * np.eye(len(past)), -differences @ g)
            weights = [*gamma, 1 - gamma.sum()]
            mixed_value = sum(w * v for w, (v, _) in zip(weights, [*past, (value, g)], strict=True))
            mixed_g = sum(w * r for w, (_, r) in zip(weights, [*past, (value, g)], strict=True))
            by_hand = (mixed_value - mixed_g) + damping * mixed_g
            np.testing.assert_allclose(following[row].numpy(), by_hand, rtol=1e-6, err_msg=f"step {number}")
            past = [*past, (value, g)][-memory:]


def test_broyden_is_its_formula():
    """B ← B + (s − B y) sᵀB / sᵀB y, from −I again whenever the memory is full; z ← z − B g."""
    memory, features = 3, 5
    f, expected = contraction(0.8, rows=2, features=features)
    points = points_of(ib.Broyden(memory=memory), f, torch.zeros_like(expected), 8)
    for row in range(2):
        inverse, terms, before = -np.eye(features), 0, None
        for number, (at, following) in enumerate(pairwise(points)):
            z, g = at[row].numpy(), (f(at) - at)[row].numpy()
            if terms == memory:
                inverse, terms = -np.eye(features), 0
            if before is not None:
                s, y = z - before[0], g - before[1]
                inverse = inverse + np.outer(s - inverse @ y, s @ inverse) / (s @ inverse @ y)
                terms += 1
            np.testing.assert_allclose(
                following[row].numpy(), z - inverse @ g, rtol=1e-6, err_msg=f"step {number}"
            )
            before = z, g


def test_broyden_measures_growth_by_the_lowest_residual_since_its_memory_began():
    """Residuals of 1, 1/2, 60: 120 times the lowest, though 60 times the first."""
    solver = ib.Broyden(memory=2)
    z = torch.zeros(1, 2, dtype=torch.float64)
    state = solver.init(z)
    offset = torch.tensor([[3e-3, 0.0]], dtype=torch.float64)
    accepted = z + offset
    _, state = solver.update(z, accepted, state, None)  # the first residual of the memory
    at = torch.tensor([[0.1, 0.0]], dtype=torch.float64)
    _, state = solver.update(at, at + offset / 2, state, None)
    assert state.bold_E.all()
    value = at + offset / 2
    far = torch.tensor([[0.2, 0.0]], dtype=torch.float64)
    # 60 times the first residual and 120 times the lowest.
    back, state = solver.update(far, far + 60 * offset, state, None)
    assert torch.equal(back, value)
    assert not state.bold_E.any()
    # The dropped point does not enter the memory: the next step is Picard's, with its residual as the lowest.
    fz = back + 200 * offset
    following, state = solver.update(back, fz, state, None)
    torch.testing.assert_close(following, fz)
    assert float(state.lowest_E) == pytest.approx(float(200 * offset.norm()))


def test_patience_restarts_after_each_shorter_step():
    solver = ib.PatientPicard(patience=2, factor=0.5, min_damping=0.1)
    z = torch.zeros(1, 2, dtype=torch.float64)
    state = solver.init(z)
    seen = []
    for residual in (1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5):
        proposed, state = solver.update(z, z + residual, state, None)
        seen.append(float(proposed[0, 0]) / residual)
    # A low; two residuals without a new low halve the step, and two more again; a new low, then two without.
    assert seen == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]
