"""The solver: conformance contracts, undoing steps, and convergence."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_reversible import ReversibleGradientSpec, ReversibleSolverSpec
from implicit_blocks_reversible.solver import undo
from implicit_blocks_reversible.spec import most_steps

import implicit_blocks as ib
from implicit_blocks.testing import SOLVER_CONTRACTS


@pytest.mark.parametrize("damping", [0.5, 0.8])
@pytest.mark.parametrize("contract", SOLVER_CONTRACTS)
def test_the_solver_satisfies_the_contract(contract, damping):
    SOLVER_CONTRACTS[contract](ReversibleSolverSpec(damping=damping))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_steps_can_be_undone(dtype):
    solver = ib.build(ReversibleSolverSpec())
    weight = torch.randn(6, 6, dtype=torch.float64) / 6
    z = torch.randn(3, 6).to(dtype)
    state = solver.init(z)
    path = [state]
    for _ in range(12):
        z, state = solver.update(z, torch.tanh(z.double() @ weight).to(dtype), state, None)
        path.append(state)
    for before, (current, following) in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
        fz = torch.tanh(current.to(dtype).double() @ weight).to(dtype)
        torch.testing.assert_close(undo(following, fz, 0.5), before[0], rtol=0, atol=2.0**-53 * 2**14)


@pytest.mark.parametrize(
    ("eigenvalue", "converges"),
    [(0.9, True), (-0.9, True), (1.05, False), (-1.05, False), (1.4j, True), (0.6 + 0.7j, True), (3j, False)],
)
def test_reversible_steps_converge_if_their_roots_are_inside_the_unit_circle(eigenvalue, converges):
    """``r² = (1 − β) + β λ r``; a complex eigenvalue is a rotation in the plane."""
    value = complex(eigenvalue)
    roots = torch.tensor([[0.5 * value, 0.5], [1.0, 0.0]], dtype=torch.complex128)
    assert bool(torch.linalg.eigvals(roots).abs().max() < 1) == converges
    turn = torch.tensor([[value.real, -value.imag], [value.imag, value.real]], dtype=torch.float64)
    search = ib.Search(
        solver=ib.build(ReversibleSolverSpec()), stopping=ib.Stopping(tolerance=1e-8, max_iterations=900)
    )
    found = search(lambda z: z @ turn.T + 1, torch.zeros(1, 2, dtype=torch.float64))
    assert bool(found.converged.all()) == converges


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"damping": 1.0}, "damping", "less than 1"),
        ({"steps": 60}, "steps", "take at most 39"),
        ({"steps": 20, "damping": 0.8}, "steps", "take at most 17"),
        ({"max_error": 0.0}, "max_error", "greater than 0"),
    ],
)
def test_an_invalid_field_is_refused_with_its_name(check_refused, fields, place, message):
    check_refused(ReversibleGradientSpec, fields, place, message)


def test_the_bound_follows_the_growth_of_rounding_errors():
    assert 2.0**-53 * 2.0 ** most_steps(0.5, 1e-4) <= 1e-4 < 2.0**-53 * 2.0 ** (most_steps(0.5, 1e-4) + 1)
    ReversibleGradientSpec(steps=most_steps(0.3, 1e-6), damping=0.3, max_error=1e-6)


def test_prefix_scope_keeps_tokens_apart():
    search = ib.Search(
        solver=ib.build(ReversibleSolverSpec()),
        stopping=ib.Stopping(tolerance=1e-9, max_iterations=400, scope="prefix"),
    )
    x = torch.randn(2, 5, 3, dtype=torch.float64)

    def solve(x: torch.Tensor) -> torch.Tensor:
        def causal(z):
            return torch.tanh(0.4 * z + 0.2 * torch.nn.functional.pad(z, (0, 0, 1, 0))[:, :-1] + x)

        found = search(causal, torch.zeros_like(x))
        assert bool(found.converged.all())
        return found.z

    changed = x.clone()
    changed[:, 3:] += 1
    assert torch.equal(solve(x)[:, :3], solve(changed)[:, :3])
