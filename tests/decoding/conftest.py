"""Tiny models of both mixer families whose search converges, and prompts of unequal length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import implicit_blocks as ib

MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
}


def _model(family: str, *, tolerance: float = 1e-6, **changes: Any) -> Any:
    torch.manual_seed(0)
    tight = ib.AtEvaluation(stopping=ib.StoppingOverrides(tolerance=tolerance, max_iterations=200))
    fields: dict[str, Any] = {
        "vocab_size": 19,
        "d_model": 16,
        "n_layers": 2,
        "at_evaluation": tight,
        "pad_vocab_to": 8,
    }
    model = ib.build(ib.ImplicitLMSpec(**(fields | MIXERS[family] | changes))).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(20)  # so that logits and rows differ clearly
        for block in model.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(10.0)
    return model


@pytest.fixture(params=list(MIXERS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    return _model


@pytest.fixture
def explicit_model() -> Callable[[str], Any]:
    """Return a function that builds the explicit model of a family."""

    def make(family: str) -> Any:
        torch.manual_seed(0)
        return ib.build(ib.ExplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, **MIXERS[family])).eval()

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(19, (n,), generator=generator).tolist() for n in (6, 3, 1, 8)]
