"""The distribution of a learned exit gate, against a published implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from implicit_blocks.exits import exit_distribution, first_exit

CASE = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "reference" / "ouro_tiny"


@pytest.fixture(scope="module")
def expected():
    if not CASE.is_dir():
        pytest.skip(f"no fixtures at {CASE}")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    return safetensors.load_file(CASE / "expected.safetensors")


def test_the_distribution_and_exits_are_those_of_ouro(expected):
    logits = torch.stack([expected[f"loop{loop}/gate_logit"] for loop in range(1, 5)])
    distribution = exit_distribution(logits)
    torch.testing.assert_close(distribution, expected["exit_pdf"], rtol=1e-6, atol=1e-7)
    exact = exit_distribution(logits.double())
    torch.testing.assert_close(exact, expected["f64/exit_pdf"], rtol=1e-5, atol=1e-6)
    thresholds = [name.removeprefix("exit_step_") for name in expected if name.startswith("exit_step_")]
    assert len(thresholds) == 3
    for threshold in thresholds:
        steps = expected[f"exit_step_{threshold}"]
        assert steps.unique().numel() > 1
        assert torch.equal(first_exit(distribution, float(threshold)), steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_distribution_sums_to_1_and_has_at_least_single_precision(dtype):
    logits = torch.randn(5, 3, 4, dtype=dtype)
    distribution = exit_distribution(logits)
    assert distribution.shape == (3, 4, 5)
    assert distribution.dtype == torch.promote_types(dtype, torch.float32)
    assert (distribution >= 0).all()
    torch.testing.assert_close(distribution.sum(-1), torch.ones_like(distribution[..., 0]))


def test_the_gate_of_the_last_loop_has_no_effect():
    logits = torch.randn(3, 2, 4, requires_grad=True)
    distribution = exit_distribution(logits)
    (gradient,) = torch.autograd.grad(distribution.square().sum(), logits)
    assert gradient[:-1].abs().min() > 0
    assert not gradient[-1].any()


def test_the_last_loop_is_the_exit_where_rounding_leaves_less_than_the_threshold():
    distribution = torch.tensor([[[0.3, 0.3, 0.39]], [[1.0, 0.0, 0.0]]])
    assert first_exit(distribution, 1.0).tolist() == [[2], [0]]


def test_wrong_shapes_and_thresholds_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\).*loops, batch, tokens"):
        exit_distribution(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"\(0, 2, 3\).*at least one"):
        exit_distribution(torch.zeros(0, 2, 3))
    for threshold in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"threshold is {threshold}.*\(0, 1\]"):
            first_exit(torch.ones(1, 1, 2) / 2, threshold)
