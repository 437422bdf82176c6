"""The retrofits of the zoo: their sizes, and the curriculum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.specs import load_spec, zoo_names

# parameters of the pretrained models
PUBLISHED = {
    "retrofit_llama_3.2_1b": 1_235_814_400,
    "retrofit_mamba2_130m": 128_989_632,
    "retrofit_mistral_7b": 7_248_023_552,
    "retrofit_qwen2.5_0.5b": 494_032_768,
    "retrofit_qwen3_0.6b": 596_049_920,
}


def test_every_pretrained_model_has_its_size_here() -> None:
    names = {name for name in zoo_names() if name.startswith("retrofit_") and "books" not in name}
    assert names == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_gate_is_the_only_addition_to_the_published_parameters(name: str) -> None:
    model: Any = load_spec(name).model
    with torch.device("meta"):
        built = ib.build(model)
    assert sum(parameter.numel() for parameter in built.parameters()) == PUBLISHED[name] + model.d_model


@pytest.mark.parametrize("name", [*PUBLISHED, "retrofit_books_10m"])
def test_training_has_at_least_two_loops_so_that_the_gate_has_a_gradient(name: str) -> None:
    spec: Any = load_spec(name)
    assert [phase.model.depth.loops for phase in spec.phase_specs()] == [2, 4]
    assert spec.model.injection.gate_init == 0
