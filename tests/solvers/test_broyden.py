"""Broyden's method: its properties beyond the contract of every solver."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.testing.solvers import AffineMap, contraction


def search(solver: ib.Solver, **stopping) -> ib.Search:
    return ib.Search(solver=solver, stopping=ib.Stopping(**stopping))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_broyden_needs_fewer_iterations_than_picard_on_a_hard_contraction(dtype):
    """Eigenvalues up to ±0.98: Picard takes 416 iterations, Broyden at most 54 with 5 terms, 43 with 10."""
    f, _ = contraction(0.98, features=40, dtype=dtype)
    z0 = torch.zeros(4, 40, dtype=dtype)
    picard = search(ib.Picard(), tolerance=1e-5, max_iterations=3000)(f, z0)
    assert picard.converged.all()
    for memory, share in ((5, 0.2), (10, 0.15)):
        broyden = search(ib.Broyden(memory=memory), tolerance=1e-5, max_iterations=3000)(f, z0)
        assert broyden.converged.all()
        assert (broyden.iterations <= share * picard.iterations).all()


def test_broyden_converges_on_an_expanding_map():
    """The map is a rotation scaled by 1.5, on which Picard diverges."""
    rotation = 1.5 * torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    offset = torch.randn(2, 6, dtype=torch.float64)
    f, z0 = AffineMap(rotation.expand(2, 6, 6), offset), torch.zeros(2, 6, dtype=torch.float64)
    picard = search(ib.Picard(), tolerance=1e-9, max_iterations=100)(f, z0)
    assert not picard.converged.any()
    broyden = search(ib.Broyden(memory=12), tolerance=1e-9, max_iterations=100)(f, z0)
    assert broyden.converged.all()
    torch.testing.assert_close(
        broyden.z, torch.linalg.solve(torch.eye(6, dtype=torch.float64) - rotation, offset.T).T
    )


def test_the_broyden_inverse_satisfies_the_secant_condition():
    """The inverse maps the change of g to the step, also after the memory is full."""
    solver, (f, expected) = ib.Broyden(memory=3), contraction(0.9)
    z = torch.zeros_like(expected)
    state, before = solver.init(z), None
    for _ in range(9):
        fz = f(z)
        proposed, state = solver.update(z, fz, state, f)
        if before is not None:
            step, change = z - before[0], (fz - z) - before[1]
            weights = torch.einsum("emf,ef->em", state.right_EMF, change)
            mapped = torch.einsum("emf,em->ef", state.left_EMF, weights) - change
            torch.testing.assert_close(mapped, step)
            assert (state.terms_E >= 1).all()
        before, z = (z, fz - z), proposed


def test_broyden_stays_at_a_fixed_point():
    solution = search(ib.Broyden(), tolerance=0.0, max_iterations=30)(
        lambda z: torch.ones_like(z), torch.ones(2, 3)
    )
    assert torch.equal(solution.z, torch.ones(2, 3))


def test_broyden_restarts_from_the_last_accepted_point_after_an_overshoot():
    """The map changes beyond 1: the search continues from the last accepted value, with empty memory."""
    points = []

    def f(z):
        points.append(z.clone())
        return torch.where(z > 1, -500.0 * z, 0.9 * z + 0.2)

    search(ib.Broyden(memory=2), tolerance=0.0, max_iterations=12)(f, torch.zeros(1, 1, dtype=torch.float64))
    values = [float(p) * 0.9 + 0.2 if float(p) <= 1 else -500.0 * float(p) for p in points]
    far = next(k for k, p in enumerate(points) if float(p) > 1)
    assert far > 0
    assert float(points[far + 1]) == pytest.approx(values[far - 1])


def test_broyden_updates_are_differentiable():
    weight = (0.5 * torch.randn(4, 4, dtype=torch.float64)).requires_grad_()
    layer = ib.FixedPoint(
        lambda z, x: torch.tanh(z @ weight + x),
        solver=ib.Broyden(memory=2),
        gradient=ib.Unrolled(steps=5),
        stopping=ib.Stopping(tolerance=0.0),
    )
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, v: layer(v).z, (weight, x))


def test_broyden_solves_models_that_picard_does_not():
    """Untrained models, whose map is no contraction: Picard solves 1 of 4 sequences, Broyden all of them."""
    spec = ib.ImplicitLMSpec(
        vocab_size=11, d_model=16, n_layers=1, mixer=ib.Mamba2Spec(d_state=4, head_dim=8)
    )
    converged = {"picard": 0, "broyden": 0}
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = ib.ImplicitLM(spec).eval()
        tokens = torch.randint(0, 11, (2, 12))
        for solver in (ib.PicardSpec(damping=0.8), ib.BroydenSpec()):
            at_evaluation = ib.AtEvaluation(solver=solver)
            model.reconfigure(spec.model_copy(update={"at_evaluation": at_evaluation}))
            solution = model(tokens, tolerance=1e-5, max_iterations=400).solution
            assert solution.residual[solution.converged].le(1e-5).all()
            converged[solver.kind] += int(solution.converged.sum())
    assert converged["broyden"] > converged["picard"]
