"""The zoo: its specs, their sizes and costs, and the time to load them."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from pydantic import BaseModel

from implicit_blocks.models.counting import count_flops, count_parameters, training_flops_per_token
from implicit_blocks.specs import MLPSpec, load_spec, zoo_names
from implicit_blocks.specs.loading import zoo_folder
from trainer.experiments.common.runs import explicit_twin

SIZES = ("130m", "350m", "760m", "1.3b")
MODELS = [f"{family}_{size}" for family in ("llama", "mamba2") for size in SIZES]

# layers, width, millions of parameters of the explicit model and of the injection, as published
PUBLISHED = {
    "mamba2_130m": (24, 768, 129.0, 2.6),
    "mamba2_350m": (48, 1024, 368.3, 4.5),
    "mamba2_760m": (48, 1536, 780.2, 9.9),
    "mamba2_1.3b": (48, 2048, 1343.8, 17.4),
    "llama_130m": (12, 768, 123.6, 1.8),
    "llama_350m": (24, 1024, 353.5, 3.1),
    "llama_760m": (24, 1536, 756.8, 7.1),
    "llama_1.3b": (24, 2048, 1311.0, 12.6),
}


def test_the_zoo_contains_every_model_and_its_twins() -> None:
    twins = [f"{name}{suffix}" for name in MODELS for suffix in ("", "_bounded", "_explicit")]
    books = [
        f"books_{size}{family}{kind}"
        for size in ("5m", "10m")
        for family in ("", "_mamba2")
        for kind in ("", "_explicit")
    ]
    others = [*books, "mamba2_state_tracking", "word_problem_s3", "word_problem_s3_explicit"]
    assert set(twins + others) <= set(zoo_names())


@pytest.mark.parametrize("name", ["mamba2_state_tracking", "word_problem_s3", "llama_130m"])
def test_every_spec_accepts_another_solver(name: str) -> None:
    spec: Any = load_spec(name, ["model.solver.kind=anderson"])
    assert spec.phase_specs()[-1].model.solver.kind == "anderson"


def test_variants_have_at_most_three_lines() -> None:
    folder = zoo_folder()
    assert folder is not None
    for name in MODELS:
        for suffix in ("_bounded", "_explicit"):
            lines = (folder / f"{name}{suffix}.yaml").read_text().splitlines()
            assert len(lines) <= 3, name


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_equal_the_published_ones(name: str) -> None:
    layers, width, explicit, injection = PUBLISHED[name]
    model: Any = load_spec(name).model
    counts, twin = count_parameters(model), count_parameters(load_spec(f"{name}_explicit").model)
    assert counts is not None
    assert twin is not None
    assert counts.injection is not None
    assert twin.total is not None
    assert (model.n_layers, model.d_model) == (layers, width)
    assert round(twin.total / 1e6, 1) == explicit
    # 3.1493 M are published as 3.1
    assert counts.injection / 1e6 == pytest.approx(injection, abs=0.051)
    assert counts.backbone == twin.backbone
    assert (twin.injection, twin.gains, twin.head) == (0, 0, 0)


def test_gains_of_weight_norm_are_counted() -> None:
    counts = count_parameters(load_spec("mamba2_130m").model)
    assert counts is not None
    assert counts.total is not None
    assert round(counts.total / 1e6, 1) == 131.7
    assert counts.gains == 24 * (3352 + 1792 + 768) + 3352


@pytest.mark.parametrize("name", MODELS)
def test_the_phases_are_bounded_and_free(name: str) -> None:
    spec: Any = load_spec(name)
    bounded, free = spec.phase_specs()
    assert (bounded.name, free.name) == ("bounded", "free")
    assert bounded.last_step / spec.total_steps == pytest.approx(0.8, abs=1e-5)
    steps = 24 if name.startswith("mamba2") else 32
    assert (free.model.stopping.max_iterations, free.model.gradient.steps) == (steps, 4)
    assert (bounded.model.stopping.max_iterations, bounded.model.gradient.steps) == (4, 1)
    assert bounded.model.stopping.tolerance == free.model.stopping.tolerance == 0.05
    assert free.model.evaluation_stopping.max_iterations == 4 * steps
    assert spec.training.batch_size * spec.data.seq_len == 2**20
    [only] = load_spec(f"{name}_bounded").phase_specs()
    assert only.model == bounded.model


@pytest.mark.parametrize("name", MODELS)
def test_padded_vocabulary_sizes_equal_the_published_ones(name: str) -> None:
    padded = {suffix: load_spec(name + suffix).model.padded_vocab_size for suffix in ("", "_explicit")}
    own = 50288 if name.startswith("mamba2") else 50277
    assert padded == {"": own, "_explicit": 50277 if name == "mamba2_130m" else own}


def test_state_tracking_has_the_published_settings() -> None:
    spec: Any = load_spec("mamba2_state_tracking")
    assert spec.model.vocab_size == 240
    assert spec.model.evaluation_stopping.max_iterations == 2048
    unrolled, free = spec.phase_specs()
    assert (unrolled.last_step, unrolled.model.gradient.steps) == (4005, 4)
    assert (free.model.stopping.max_iterations, free.model.gradient.steps) == (32, 4)


@pytest.mark.parametrize(
    ("name", "gigaflops", "tolerance"),
    # 7 forward passes of the layers and 3 of the head
    [
        ("llama_1.3b", 18.9, 0.01),
        ("llama_130m", 1.7, 0.02),
        ("mamba2_1.3b", 19.5, 0.03),
        ("mamba2_130m", 1.8, 0.08),
    ],
)
def test_training_flops_agree_with_other_estimates(name: str, gigaflops: float, tolerance: float) -> None:
    flops = training_flops_per_token(load_spec(f"{name}_bounded").model, length=2048)
    assert flops is not None
    assert flops / 1e9 == pytest.approx(gigaflops, rel=tolerance)


def test_counts_equal_those_computed_by_hand() -> None:
    model: Any = load_spec("word_problem_s3").model
    counts, flops = count_parameters(model), count_flops(model, length=32)
    width = 2 * 128 + 2 * 32 + 4
    assert counts is not None
    assert counts.embedding == 6 * 64
    assert counts.injection == width * 64 + width + 64
    assert counts.backbone == (width * 64 + 192 * 5 + 3 * 4 + 128 + 128 * 64) + 64 + 64
    assert flops is not None
    # projections, convolution; the scan takes all 32 tokens as one chunk
    assert flops.layers == 2 * 64 * (width + 128) + 2 * 4 * 192 + 2 * 32 * (32 + 128) + 4 * 32 * 128
    assert flops.head == 2 * 64 * 6
    assert flops.injection == 2 * 64 * width


def test_attention_flops_count_the_causal_half() -> None:
    model = load_spec("llama_130m").model
    short, long = (count_flops(model, length=length) for length in (1, 1025))
    assert short is not None
    assert long is not None
    assert long.layers - short.layers == 12 * 2 * 768 * 1024


def test_counts_are_unknown_if_a_component_does_not_provide_them() -> None:
    class SilentSpec(MLPSpec):
        kind: str = "silent"

    # Not registered; pydantic's own copy does not validate it.
    model: Any = BaseModel.model_copy(load_spec("word_problem_s3").model, update={"mlp": SilentSpec()})
    counts, flops = count_parameters(model), count_flops(model, length=32)
    assert counts is not None
    assert (counts.backbone, counts.gains, counts.total) == (None, None, None)
    assert counts.injection is not None
    assert flops is not None
    assert flops.layers is None
    assert training_flops_per_token(model, length=32) is None


def test_loading_the_zoo_imports_no_torch_and_takes_seconds() -> None:
    program = (
        "import sys, time; start = time.process_time()\n"
        "import implicit_blocks.specs, implicit_blocks.registry, trainer.specs.run\n"
        "from implicit_blocks import load_spec\n"
        "for name in implicit_blocks.specs.zoo_names(): load_spec(name)\n"
        "print(time.process_time() - start)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10  # about 1 s on an idle core


def test_each_spec_loads_within_a_second() -> None:
    for name in zoo_names():
        start = time.process_time()
        load_spec(name)
        assert time.process_time() - start < 1, name


@pytest.mark.parametrize(
    ("name", "size"),
    [("books_5m", 5.4e6), ("books_5m_mamba2", 5.7e6), ("books_10m", 10.5e6), ("books_10m_mamba2", 10.5e6)],
)
def test_the_book_models_have_their_sizes_and_equal_training_for_twins(name: str, size: float) -> None:
    spec, twin = load_spec(name), load_spec(f"{name}_explicit")
    for model in (spec.model, twin.model):
        counts = count_parameters(model)
        assert counts is not None
        assert counts.total is not None
        assert counts.total == pytest.approx(size, rel=0.06)
    assert (spec.training, spec.data, spec.evaluation) == (twin.training, twin.data, twin.evaluation)  # type: ignore[attr-defined]  # a run
    bounded, free = spec.phase_specs()  # type: ignore[attr-defined]  # the same
    assert (bounded.model.stopping.max_iterations, bounded.model.gradient.steps) == (3, 3)
    assert free.model.gradient.steps == 4
    assert [length / spec.data.seq_len for length in spec.evaluation.lengths] == [1, 2, 4, 8]  # type: ignore[attr-defined]  # the same


@pytest.mark.parametrize("name", ["books_5m_mamba2", "books_10m_mamba2"])
def test_the_penalty_changes_only_the_gradient_of_the_free_phase(name: str) -> None:
    plain, penalized = load_spec(name), load_spec(f"{name}_penalty")
    assert explicit_twin(f"{name}_penalty") == load_spec(f"{name}_explicit")
    for field in ("training", "data", "evaluation"):
        assert getattr(plain, field) == getattr(penalized, field)
    (first, free), (same, other) = (spec.phase_specs() for spec in (plain, penalized))  # type: ignore[attr-defined]  # runs
    assert first == same
    assert other.model.gradient.kind == "jacobian_penalty"
    assert other.model.gradient.gradient == free.model.gradient
    assert other.model.model_copy(update={"gradient": free.model.gradient}) == free.model
