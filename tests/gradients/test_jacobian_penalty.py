"""The Jacobian penalty: its value and gradient against the dense Jacobian, and its effect in training."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.gradients.jacobian_penalty import jacobian_size

DOUBLE = torch.float64


def dense_size(f, z: torch.Tensor) -> torch.Tensor:
    """Return ``‖J‖²_F / d`` of every row, computed from the dense Jacobian."""
    sizes = []
    for row in range(z.shape[0]):
        jacobian = torch.autograd.functional.jacobian(
            lambda v, row=row: f(torch.cat((z[:row], v[None], z[row + 1 :])))[row], z[row], create_graph=True
        )
        sizes.append(jacobian.square().sum() / z[row].numel())
    return torch.stack(sizes)


def test_the_jacobian_estimate_matches_the_dense_jacobian():
    weight = (torch.randn(20, 20, dtype=DOUBLE) / 5).requires_grad_()

    def f(z):
        return torch.tanh(z @ weight)

    z = torch.randn(3, 20, dtype=DOUBLE)
    expected, found = dense_size(f, z), jacobian_size(f, z, probes=4000, step=1e-3)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0)
    (of_dense,) = torch.autograd.grad(expected.sum(), weight)
    (of_estimate,) = torch.autograd.grad(found.sum(), weight)
    assert (of_dense - of_estimate).norm() < 0.1 * of_dense.norm()


def test_one_probe_is_exact_for_a_diagonal_jacobian():
    """Random signs square to 1, so only the error of the differences remains: quadratic in their step."""
    z = torch.randn(2, 5, 4, dtype=DOUBLE)
    expected = torch.cos(z).square().flatten(1).mean(1)
    errors = [(jacobian_size(torch.sin, z, step=step) - expected).abs().max() for step in (1e-2, 1e-3)]
    assert errors[0] < 1e-4
    assert errors[1] < 0.02 * errors[0]


def test_the_jacobian_estimate_ignores_padding():
    z, valid = torch.randn(2, 6, 4, dtype=DOUBLE), torch.ones(2, 6, dtype=torch.bool)
    valid[0, 4:] = False

    def f(point):
        return torch.sin(point) * torch.where(valid, 1.0, 1e3)[:, :, None]

    found = jacobian_size(f, z, valid=valid, step=1e-4)
    expected = torch.stack([torch.cos(z[0, :4]).square().mean(), torch.cos(z[1]).square().mean()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_the_penalty_is_added_to_that_of_the_other_gradient():
    weight = torch.randn(6, 6, dtype=DOUBLE) / 5
    plain, residual = ib.LastLoops(loops=1), ib.LastLoops(loops=1, residual_weight=0.5)
    found = {}
    for gradient in (residual, ib.JacobianPenalty(gradient=plain), ib.JacobianPenalty(gradient=residual)):
        torch.manual_seed(0)
        layer = ib.FixedPoint(
            lambda z, x: torch.tanh(z @ weight + x),
            gradient=gradient,
            stopping=ib.Stopping(tolerance=0, max_iterations=2),
        )
        found[gradient] = layer(torch.ones(3, 6, dtype=DOUBLE, requires_grad=True)).penalty.detach()
    of_residual, of_jacobian, of_both = found.values()
    torch.testing.assert_close(of_both, of_residual + of_jacobian, rtol=1e-5, atol=0)
    assert (of_residual > 0).all()


@pytest.mark.parametrize("mixer", [ib.Mamba2Spec(d_state=4, head_dim=8), ib.AttentionSpec(n_heads=2)])
def test_training_on_the_penalty_shrinks_the_jacobian(mixer):
    """Only the penalty is trained, so nothing else changes the Jacobian."""
    spec = ib.ImplicitLMSpec(
        vocab_size=7, d_model=16, n_layers=1, mixer=mixer, gradient=ib.JacobianPenaltySpec(weight=1.0)
    )
    model = ib.ImplicitLM(spec)
    tokens = torch.randint(0, 7, (4, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sizes = []
    for _ in range(15):
        penalty = model(tokens).solution.penalty
        assert penalty.shape == (4,)
        optimizer.zero_grad()
        penalty.mean().backward()
        optimizer.step()
        sizes.append(float(penalty.detach().mean()))
    assert sum(sizes[-3:]) < 0.7 * sum(sizes[:3])


def test_the_trainer_adds_the_penalty_to_the_differentiated_loss(tmp_path):
    """With the penalty, training leads to other weights."""
    from trainer.run.build import build
    from trainer.specs.run import RunSpec

    weights = {}
    for name, gradient in (
        ("without", {"kind": "phantom"}),
        ("with", {"kind": "jacobian_penalty", "weight": 3.0}),
    ):
        spec = RunSpec.model_validate(
            {
                "model": {
                    "kind": "implicit_lm",
                    "d_model": 16,
                    "n_layers": 1,
                    "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
                    "gradient": gradient,
                    "stopping": {"max_iterations": 4},
                },
                "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
                "training": {
                    "max_steps": 2,
                    "batch_size": 8,
                    "micro_batch_size": 4,
                    "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
                    "schedule": {"kind": "warmup_linear", "warmup": 0},
                    "threads": 1,
                },
                "evaluation": {"sequences": 2, "batch_size": 2},
            }
        )
        run = build(spec, output=tmp_path / name, device="cpu")
        run.train()
        weights[name] = run.model.state_dict()
    assert any(not torch.equal(weights["with"][key], value) for key, value in weights["without"].items())


def test_probe_steps_scale_with_the_rms_of_a_rows_real_features():
    """Each real feature moves by ``step`` times the root mean square of the row's real features."""
    z = torch.tensor([[[3.0], [4.0], [0.0]], [[1.0], [1.0], [50.0]], [[0.0], [0.0], [0.0]]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    points = []

    def f(point):
        points.append(point.clone())
        return point

    jacobian_size(f, z, valid=valid, step=0.1)
    lengths = [0.1 * (25 / 3) ** 0.5, 0.1, 0.1]  # a row of zeros moves by the step itself
    for point in points:
        moved = (point - z).abs().squeeze(2)
        expected = torch.tensor(lengths)[:, None] * valid
        torch.testing.assert_close(moved, expected)
