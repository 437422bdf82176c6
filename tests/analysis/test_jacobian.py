"""Theorem 1: the formula against autograd and finite differences, in the setting of the paper's Figure 7."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.analysis import state_jacobian

SHAPE = {"vocab_size": 60, "n_layers": 1}


def model(kind: str, *, d_model: int = 64, dtype: torch.dtype = torch.float64, **changes) -> torch.nn.Module:
    mixer = ib.Mamba2Spec(d_state=1, expand=1, head_dim=d_model)
    spec = ib.ImplicitLMSpec if kind == "implicit" else ib.ExplicitLMSpec
    return ib.build(spec(**{**SHAPE, "d_model": d_model, "mixer": mixer, **changes})).to(dtype).eval()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_implicit_models_jacobian_is_dense(seed):
    """Figure 7: 1 layer, d = 64, expand 1, one head, d_state 1, float64."""
    torch.manual_seed(seed)
    found = state_jacobian(model("implicit"), torch.randint(0, 60, (1, 16)))
    assert found.formula.shape == (64, 64)
    assert found.residual <= 1e-12
    assert found.formula_against_autograd <= 1e-6
    assert found.formula_against_differences <= 1e-5
    assert found.rank == 64
    assert found.feedback_rank > 32
    off_diagonal = found.autograd - torch.diag(found.autograd.diagonal())
    assert float(off_diagonal.abs().max()) > 1e-5  # far above what the three ways differ by
    assert found.off_diagonal_mass == pytest.approx(
        float(off_diagonal.norm() ** 2 / found.autograd.norm() ** 2), rel=1e-6
    )


def test_the_explicit_twins_is_diagonal():
    found = state_jacobian(model("explicit"), torch.randint(0, 60, (1, 16)))
    assert found.formula_against_autograd <= 1e-12
    assert found.formula_against_differences <= 1e-5
    assert found.off_diagonal_mass == 0
    assert found.feedback_rank == 0
    torch.testing.assert_close(found.autograd, torch.diag(found.transition))


def test_several_heads_and_state_entries():
    """Λ is then another one for each head; the state is (heads, head width, state width) in a row."""
    mixer = ib.Mamba2Spec(d_state=3, expand=2, head_dim=4, dt_min=0.1, dt_max=1.0)
    found = state_jacobian(model("implicit", d_model=8, mixer=mixer), torch.randint(0, 60, (1, 5)))
    assert found.formula.shape == (48, 48)
    assert found.formula_against_autograd <= 1e-6
    assert found.formula_against_differences <= 1e-5
    heads = found.transition.view(4, 12)
    torch.testing.assert_close(heads, heads[:, :1].expand(-1, 12))
    assert heads[:, 0].diff().abs().min() > 1e-3


@pytest.mark.parametrize(
    ("make", "tokens", "message"),
    [
        (lambda: model("implicit", d_model=8, n_layers=2), (1, 4), "layers are Mamba2, Mamba2"),
        (
            lambda: model("implicit", d_model=8, mixer=ib.AttentionSpec(n_heads=2)),
            (1, 4),
            "layers are Attention",
        ),
        (lambda: model("implicit", d_model=8, dtype=torch.float32), (1, 4), r"call model.double\(\)"),
        (lambda: model("implicit", d_model=8), (2, 4), "with T at least 2"),
        (lambda: model("implicit", d_model=8), (1, 1), "with T at least 2"),
        (lambda: torch.nn.Linear(2, 2), (1, 4), "model is a Linear"),
    ],
)
def test_what_the_theorem_is_not_about_is_refused(make, tokens, message):
    with pytest.raises(ValueError, match=message):
        state_jacobian(make(), torch.zeros(tokens, dtype=torch.int64))


def test_a_fixed_point_that_is_not_found_is_said():
    with pytest.raises(ValueError, match=r"the fixed point was not found: residual .* after 2 iterations"):
        state_jacobian(model("implicit", d_model=8), torch.randint(0, 60, (1, 4)), max_iterations=2)
