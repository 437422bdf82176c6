"""Whole training steps captured as CUDA graphs: the losses of eager steps, side by side too."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.token_files import write_tokens
from trainer.experiments.equal_compute.recipes import Recipe, spec_of
from trainer.run.side_by_side import Planned, Trained, begin, train_side_by_side

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SMALL = {
    "width": 64, "learning_rate": 4e-3, "weight_decay": 1.5, "petaflops": 4e-6, "batch_size": 4,
    "length": 64, "vocab_size": 256, "precision": "float32",
}  # fmt: skip
RECIPES = [
    Recipe(**SMALL, family="llama", layers=(0, 2, 0)),
    Recipe(**SMALL, family="llama", layers=(1, 1, 1), loops=3, average=0.9),
    Recipe(**SMALL, family="llama", layers=(1, 1, 1), loops=3, gradient_loops=2, loops_from=0.5),
    Recipe(**SMALL, family="mamba2", layers=(1, 1, 1), loops=2),
    Recipe(
        **SMALL, family="llama", layers=(1, 1, 1), loops=3, end_loops=4, end_from=0.5, residual_weight=1.0
    ),
    Recipe(**SMALL, family="llama", layers=(1, 1, 1), loops=3, optimizer="muon", average=0.9),
    Recipe(
        **SMALL,
        family="mamba2",
        layers=(1, 1, 1),
        loops=2,
        average=0.9,
        changes=("model.depth={kind: uniform, low: 1, high: 3}",),
    ),
]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    write_tokens(path, np.random.default_rng(0).integers(0, 256, 6401), vocab_size=256)
    return path


def losses(recipe: Recipe, tokens: Path, device: str, not_captured: str | None = None) -> torch.Tensor:
    one = begin(Planned(recipe.name, spec_of(recipe, tokens), 1.0, recipe.averages), torch.device(device))
    if not_captured is not None:
        one.step.recapture(not_captured)
    while not one.finished:
        if one.ready():
            one.advance()
    found = one.step.losses()
    if device == "cuda" and not_captured is None:
        assert one.step.not_captured is None
        assert one.step.graphs
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_captured_steps_have_the_losses_of_eager_ones(recipe, tokens):
    captured = losses(recipe, tokens, "cuda")
    assert bool(captured.isfinite().all())
    torch.testing.assert_close(captured, losses(recipe, tokens, "cuda", "a test"), rtol=2e-3, atol=0)
    torch.testing.assert_close(captured, losses(recipe, tokens, "cpu"), rtol=2e-2, atol=0)


def test_models_on_several_streams_have_the_losses_of_models_alone(tokens):
    found: dict[str, torch.Tensor] = {}

    def end(one: Trained) -> None:
        found[one.planned.name] = one.step.losses()

    queue = [Planned(one.name, spec_of(one, tokens), 1.0, one.averages) for one in RECIPES]
    assert train_side_by_side(queue, device=torch.device("cuda"), on_end=end, side_by_side=3) == []
    for recipe in RECIPES:
        torch.testing.assert_close(found[recipe.name], losses(recipe, tokens, "cuda"), rtol=2e-3, atol=0)
