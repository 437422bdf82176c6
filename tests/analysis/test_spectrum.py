"""The spectral radius: where a Rayleigh quotient is wrong, and against dense eigenvalues."""

from __future__ import annotations

import math

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.analysis import spectral_radius

DOUBLE = torch.float64


def rotation(size: float, angle: float = math.pi / 2) -> torch.Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return size * torch.tensor([[c, -s], [s, c]], dtype=DOUBLE)


def test_a_rotation_where_a_rayleigh_quotient_is_nothing():
    turn = rotation(0.95)
    vector = torch.randn(2, dtype=DOUBLE)
    assert float(vector @ turn @ vector / (vector @ vector)) == pytest.approx(0, abs=1e-15)
    found = spectral_radius(lambda z: z @ turn.T, torch.zeros(3, 2, dtype=DOUBLE))
    torch.testing.assert_close(found.radius, torch.full((3,), 0.95, dtype=DOUBLE), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.eigenvalue.imag.abs(), found.radius)
    assert (found.residual < 1e-10).all()


def test_a_rotation_hidden_among_many_directions():
    """Found in far fewer steps than there are directions."""
    basis, _ = torch.linalg.qr(torch.randn(200, 200, dtype=DOUBLE))
    jacobian = torch.diag(torch.linspace(-0.6, 0.6, 200, dtype=DOUBLE))
    jacobian[:2, :2] = rotation(0.95, 1.2)
    jacobian = basis @ jacobian @ basis.T
    found = spectral_radius(lambda z: z @ jacobian.T, torch.zeros(2, 200, dtype=DOUBLE), steps=40)
    torch.testing.assert_close(found.radius, torch.full((2,), 0.95, dtype=DOUBLE), atol=1e-6, rtol=0)
    assert (found.residual < 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_that_of_the_dense_jacobian_row_by_row(dtype):
    weight = torch.randn(3, 12, 12, dtype=dtype) / 3

    def f(z):
        return torch.tanh(torch.einsum("bij,bj->bi", weight, z) + 0.3)

    z = torch.randn(3, 12, dtype=dtype)
    dense = torch.stack(
        [torch.autograd.functional.jacobian(lambda v: f(v), z)[row, :, row] for row in range(3)]
    )
    expected = torch.linalg.eigvals(dense.double()).abs().amax(1)
    found = spectral_radius(f, z)
    torch.testing.assert_close(found.radius, expected, atol=1e-10 if dtype == DOUBLE else 1e-4, rtol=0)
    assert found.eigenvalues.shape == (3, 12)


def test_of_no_jacobian_and_of_few_directions():
    assert spectral_radius(torch.zeros_like, torch.ones(2, 3)).radius.tolist() == [0, 0]
    found = spectral_radius(lambda z: z * torch.tensor([0.5, 0.5, 0.5]), torch.ones(2, 3), steps=3)
    torch.testing.assert_close(found.radius, torch.full((2,), 0.5, dtype=DOUBLE))
    with pytest.raises(ValueError, match="steps is 0"):
        spectral_radius(lambda z: z, torch.ones(2, 3), steps=0)


def test_it_tells_how_many_iterations_picard_takes():
    """The residual falls by the radius an iteration, near the fixed point."""
    basis, _ = torch.linalg.qr(torch.randn(20, 20, dtype=DOUBLE))
    jacobian = basis * torch.linspace(-0.9, 0.3, 20, dtype=DOUBLE) @ basis.T

    def f(z):
        return torch.tanh(z @ jacobian + 0.1)

    stopping = ib.Stopping(tolerance=1e-10, max_iterations=2000, norm="absolute")
    solution = ib.Search(solver=ib.Picard(), stopping=stopping, trace=True)(
        f, torch.zeros(1, 20, dtype=DOUBLE)
    )
    falls = float(solution.trace[-1] / solution.trace[-2])
    assert falls == pytest.approx(float(spectral_radius(f, solution.z).radius), rel=1e-3)


def test_a_row_that_is_not_finite_is_told_and_leaves_the_others_alone():
    z = torch.randn(3, 4)
    scale = torch.tensor([0.5, torch.nan, 0.25])[:, None]
    found = spectral_radius(lambda z: scale * z, z)
    assert found.radius.isnan().tolist() == [False, True, False]
    assert found.residual.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(found.radius[[0, 2]], torch.tensor([0.5, 0.25], dtype=torch.float64))


@pytest.mark.parametrize(
    ("f", "z", "message"),
    [
        (lambda z: z, torch.ones(2, 3, dtype=torch.int64), "of torch.int64; expected floating-point numbers"),
        (lambda z: z, torch.ones(3), r"z has shape \(3,\)"),
        (lambda z: z[:1], torch.ones(2, 3), r"f returned shape \(1, 3\) for z of shape \(2, 3\)"),
    ],
)
def test_what_has_no_spectrum_is_refused(f, z, message):
    with pytest.raises(ValueError, match=message):
        spectral_radius(f, z)
