"""Tiny models of both families, and folders of each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_blocks as ib

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "reference"

MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
}


def _spec(family: str, **changes: Any) -> ib.ImplicitLMSpec:
    tight = ib.AtEvaluation(stopping=ib.StoppingOverrides(tolerance=1e-6, max_iterations=200))
    fields: dict[str, Any] = {"vocab_size": 19, "d_model": 16, "n_layers": 2, "at_evaluation": tight}
    return ib.ImplicitLMSpec(**(fields | MIXERS[family] | changes))


def _model(family: str, **changes: Any) -> Any:
    """Build a transformers model whose fixed point converges."""
    from implicit_blocks.hf import from_library

    torch.manual_seed(0)
    library = ib.build(_spec(family, **changes)).eval()
    with torch.no_grad():
        for block in library.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(40.0)
    return from_library(library)


@pytest.fixture(params=list(MIXERS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny_spec() -> Callable[..., ib.ImplicitLMSpec]:
    return _spec


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    return _model


@pytest.fixture
def reference() -> Path:
    """Return the folder of the published implementation's tensors, or skip with a reason."""
    if not REFERENCE.is_dir():
        pytest.skip(f"no reference tensors at {REFERENCE}")
    return REFERENCE


@pytest.fixture
def ids() -> torch.Tensor:
    """Return three rows of tokens; 18 is reserved for padding."""
    return torch.randint(18, (3, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
