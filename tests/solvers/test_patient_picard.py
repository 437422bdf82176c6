"""Patient Picard: the damping falls where the residual stops falling."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.testing import check_solver


def test_patient_picard_satisfies_the_solver_contract():
    check_solver(ib.PatientPicard(patience=2))


def test_damping_falls_only_for_rows_that_overshoot():
    """Undamped steps converge at rates 0.6 and −0.6 and diverge at −1.5; half a step contracts to 0.25."""
    rates = torch.tensor([0.6, -0.6, -1.5], dtype=torch.float64)[:, None]

    def f(z):
        return rates * (z - 1) + 1

    z0 = torch.zeros(3, 4, dtype=torch.float64)
    stopping = ib.Stopping(tolerance=1e-8, max_iterations=200)
    plain = ib.Search(solver=ib.Picard(), stopping=stopping)(f, z0)
    patient = ib.Search(solver=ib.PatientPicard(patience=3), stopping=stopping)(f, z0)
    assert plain.converged.tolist() == [True, True, False]
    assert patient.converged.all()
    assert torch.equal(patient.iterations[:2], plain.iterations[:2])
    assert torch.equal(patient.z[:2], plain.z[:2])
    assert patient.iterations[2] < 60
    torch.testing.assert_close(patient.z, torch.ones_like(z0), atol=1e-6, rtol=0)


def test_damping_never_falls_below_min_damping():
    solver = ib.PatientPicard(patience=1, factor=0.1, min_damping=0.3)
    z = torch.ones(1, 2)
    state = solver.init(z)
    for _ in range(4):
        _, state = solver.update(z, z + 1, state, lambda z: z)
    assert state.damping_E.tolist() == [pytest.approx(0.3)]


def test_the_patient_picard_spec_counts_its_state_and_refuses_invalid_options():
    spec = ib.PatientPicardSpec(damping=0.9, patience=4)
    solver = ib.build(spec)
    allocated = sum(leaf.numel() * leaf.element_size() for leaf in solver.init(torch.zeros(3, 5)))
    assert allocated == 3 * spec.state_bytes(5, itemsize=4)
    with pytest.raises(ValueError, match=r"damping .*0.2"):
        ib.PatientPicardSpec(damping=0.2)
    for wrong in ({"patience": 0}, {"factor": 1.0}, {"min_damping": 2.0}, {"damping": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ib.PatientPicard(**wrong)
