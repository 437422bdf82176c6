"""FLOPs of a step: useful ones by the formula, executed ones with recomputation and waiting rows."""

from __future__ import annotations

from typing import Any

import pytest

from implicit_blocks.models.counting import count_flops
from implicit_blocks.specs import load_spec
from trainer.estimate.flops import differentiated_passes, training_flops

LENGTH = 128


@pytest.fixture(scope="module")
def model() -> Any:
    return load_spec("llama_130m").model


def test_useful_operations_count_each_iteration_once(model: Any) -> None:
    once: Any = count_flops(model, length=LENGTH)
    flops: Any = training_flops(model, length=LENGTH, iterations=6.5)
    steps = model.gradient.steps
    expected = (6.5 + 3 * steps) * once.layers + 3 * (once.injection + once.head)
    assert flops.useful == flops.executed == pytest.approx(expected)


def test_converged_rows_in_the_batch_are_executed_but_not_useful(model: Any) -> None:
    once: Any = count_flops(model, length=LENGTH)
    flops: Any = training_flops(model, length=LENGTH, iterations=6.5, iterations_executed=10)
    assert flops.executed - flops.useful == pytest.approx(3.5 * once.layers)


def test_recomputed_activations_are_executed_but_not_useful(model: Any) -> None:
    once: Any = count_flops(model, length=LENGTH)
    kept: Any = training_flops(model, length=LENGTH, iterations=4)
    again: Any = training_flops(model, length=LENGTH, iterations=4, checkpoint_activations="layers")
    assert again.useful == kept.useful
    assert again.executed - kept.executed == pytest.approx(model.gradient.steps * once.layers)


def test_recomputed_unrolled_steps_are_not_useful() -> None:
    change = "model.gradient={kind: unrolled, steps: 3, checkpointing: true}"
    model: Any = load_spec("llama_130m", [change]).model
    once: Any = count_flops(model, length=LENGTH)
    flops: Any = training_flops(model, length=LENGTH)
    assert flops.useful == pytest.approx(9 * once.layers + 3 * (once.injection + once.head))
    assert flops.executed - flops.useful == pytest.approx(3 * once.layers)


def test_an_explicit_model_costs_three_forward_passes() -> None:
    model: Any = load_spec("llama_130m_explicit").model
    once: Any = count_flops(model, length=LENGTH)
    flops: Any = training_flops(model, length=LENGTH, iterations=7)
    assert flops.useful == flops.executed == pytest.approx(3 * (once.layers + once.head))


def test_calls_of_a_penalty_are_differentiated() -> None:
    spec: Any = load_spec("books_10m_mamba2_penalty")
    model = spec.phase_specs()[1].model
    once: Any = count_flops(model, length=LENGTH)
    kept: Any = training_flops(model, length=LENGTH, iterations=4)
    assert kept.useful == pytest.approx((4 + 3 * 4 + 6) * once.layers + 3 * (once.injection + once.head))
    assert differentiated_passes(model) == 4 + 2
    again: Any = training_flops(model, length=LENGTH, iterations=4, checkpoint_activations="layers")
    assert again.executed - kept.executed == pytest.approx(6 * once.layers)
