"""The published architectures of the zoo, the sandwiches and their small variants: sizes, choices, twins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.describing import model_tree
from implicit_blocks.models.counting import count_parameters
from implicit_blocks.specs import load_spec, zoo_names
from implicit_blocks.specs.loading import zoo_folder
from trainer.experiments.equal_compute.recipes import Recipe, spec_of

# Millions of parameters as published, and the relative tolerance. Those of Attractor, Parcae and Ouro are the
# sizes in the models' names; Huginn's is a count without its adapter.
PUBLISHED = {
    "attractor_140m": (140, 0.05),
    "attractor_370m": (370, 0.03),
    "attractor_770m": (770, 0.03),
    "parcae_140m": (140, 0.05),
    "parcae_370m": (370, 0.05),
    "parcae_770m": (770, 0.03),
    "parcae_1.3b": (1300, 0.03),
    "huginn_3.5b": (3509.05, 0.02),
    "ouro_1.4b": (1400, 0.03),
    "ouro_2.6b": (2600, 0.03),
}
SANDWICHES = [f"sandwich_{name}" for name in ("llama_130m", "llama_1.3b", "mamba2_130m", "mamba2_1.3b")]
BOOKS = [
    f"books_5m_{name}" for name in ("residual", "mamba2_residual", "attractor", "parcae", "huginn", "ouro")
]


def tokens_per_step(spec: Any) -> int:
    return int(spec.training.batch_size * spec.data.seq_len)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_built_model_has_the_published_size(name: str) -> None:
    published, tolerance = PUBLISHED[name]
    spec = load_spec(name).model
    with torch.device("meta"):
        built = ib.build(spec)
    total = sum(parameter.numel() for parameter in built.parameters())
    counts = count_parameters(spec)
    assert counts is not None
    assert counts.total == model_tree(spec).parameters == total
    assert total / 1e6 == pytest.approx(published, rel=tolerance)


# width, hidden width of the MLP, layers of prelude, core and coda, as in the published configurations
CONFIGURED = {
    "attractor_140m": (1024, 4096, (7, 1, 0)),
    "attractor_370m": (1280, 5120, (15, 2, 0)),
    "attractor_770m": (1280, 5120, (35, 2, 0)),
    "parcae_140m": (768, 3072, (2, 2, 2)),
    "parcae_370m": (1024, 4096, (4, 4, 4)),
    "parcae_770m": (1280, 5120, (6, 6, 6)),
    "parcae_1.3b": (1536, 6144, (8, 8, 8)),
    "huginn_3.5b": (5280, 17920, (2, 4, 2)),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_matrices_are_those_of_the_published_configuration(name: str) -> None:
    width, d_ff, layers = CONFIGURED[name]
    vocabulary, products = (65536, 3) if name.startswith("huginn") else (32768, 2)
    matrices = vocabulary * width + sum(layers) * (4 * width**2 + products * width * d_ff)
    if name.startswith("parcae"):  # value embeddings, the injection and the map after the core
        matrices += sum(layers) // 2 * vocabulary * width + 2 * width**2
    if name.startswith("huginn"):  # the adapter
        matrices += 2 * width**2
    model: Any = load_spec(name).model
    counts = count_parameters(model)
    assert counts is not None
    assert counts.total is not None
    assert [len(stack.layers) for stack in model.stacks.values()] == [n for n in layers if n]
    assert 0 < counts.total - matrices < 3e-4 * matrices  # norms, gates, biases and scalings


def test_huginn_s_core_has_the_published_size() -> None:
    counts = count_parameters(load_spec("huginn_3.5b").model)
    assert counts is not None
    assert counts.backbone is not None
    assert round(counts.backbone / 1e6) in (1581, 1582)


@pytest.mark.parametrize("size", ["140m", "370m", "770m"])
def test_attractor_s_default_search_is_causal_and_the_published_one_is_a_choice(size: str) -> None:
    specs: list[Any] = [load_spec(f"attractor_{size}{suffix}") for suffix in ("", "_published")]
    ours, theirs = (spec.model for spec in specs)
    for model, couples, scope in ((ours, False, "prefix"), (theirs, True, "sequence")):
        assert model.solver.couples_tokens is model.at_evaluation.solver.couples_tokens is couples
        assert model.stopping.scope == model.evaluation_stopping.scope == scope
    fields = set(type(ours).model_fields) - {"solver", "stopping", "at_evaluation"}
    assert all(getattr(ours, field) == getattr(theirs, field) for field in fields)
    for place in ("solver", "at_evaluation.solver"):
        first, second = ours, theirs
        for key in place.split("."):
            first, second = getattr(first, key), getattr(second, key)
        assert (first.memory, first.damping) == (second.memory, second.beta)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("parcae")])
def test_every_second_layer_of_parcae_has_value_embeddings(name: str) -> None:
    model: Any = load_spec(name).model
    rows = [layer.mixer.value_embeddings for stack in model.stacks.values() for layer in stack.layers]
    assert rows == [None, 32768] * (len(rows) // 2)


@pytest.mark.parametrize("name", ["parcae_140m", "parcae_1.3b", "huginn_3.5b", "ouro_1.4b", "ouro_2.6b"])
def test_looped_models_evaluate_with_their_published_loops_and_states(name: str) -> None:
    model: Any = load_spec(name).model
    loops = {"parcae": 8, "huginn": 32, "ouro": 4}[name.split("_")[0]]
    assert model.at_evaluation.fixed_loops == model.state_loops == loops
    assert getattr(model.depth, "mean", loops) == loops
    assert model.gradient.kind == "last_loops"


@pytest.mark.parametrize("name", SANDWICHES)
def test_a_sandwich_has_the_layers_and_widths_of_its_family_in_thirds(name: str) -> None:
    model: Any = load_spec(name).model
    family: Any = load_spec(f"{name.removeprefix('sandwich_')}_explicit").model
    assert [len(stack.layers) for stack in model.stacks.values()] == [family.n_layers // 3] * 3
    assert count_parameters(model) is not None
    sandwich, explicit = count_parameters(model), count_parameters(family)
    assert sandwich is not None
    assert explicit is not None
    assert sandwich.layers == explicit.layers
    assert (model.injection.kind, model.start.kind) == ("residual", "prelude")


@pytest.mark.parametrize("name", [*SANDWICHES, *BOOKS])
def test_explicit_twins_have_the_same_layers_data_and_recipe(name: str) -> None:
    spec: Any = load_spec(name)
    twin: Any = load_spec(f"{name}_explicit")
    assert (spec.data, spec.evaluation) == (twin.data, twin.evaluation)
    tuned = {"max_steps": True, "max_tokens": True, "ema": True, "optimizer": {"weight_decay"}}
    exclude = tuned if "residual" in name else {}  # these are tuned on each side
    assert spec.training.model_dump(exclude=exclude) == twin.training.model_dump(exclude=exclude)
    layers, others = ([stack.layers for stack in one.model.stacks.values()] for one in (spec, twin))
    assert layers == others
    assert "residual" in name or spec.model.stacks == twin.model.stacks  # each side chose gates or none
    assert twin.model.kind == "explicit_lm"


@pytest.mark.parametrize("name", BOOKS)
def test_book_variants_share_data_steps_and_size(name: str) -> None:
    spec: Any = load_spec(name)
    counts = count_parameters(spec.model)
    assert counts is not None
    assert counts.total is not None
    assert 5e6 < counts.total < 10e6
    mamba2 = "mamba2" in name
    assert spec.model.d_model == (320 if mamba2 else 256)
    assert tokens_per_step(spec) == 8192
    assert spec.model.weight_norm == mamba2


@pytest.mark.parametrize("name", [name for name in BOOKS if "ouro" not in name])
def test_book_variants_search_in_evaluation_and_can_take_the_loops_of_training(name: str) -> None:
    model: Any = load_spec(name).model
    assert model.at_evaluation.exit.kind == "residual"
    assert model.evaluation_stopping.tolerance == 0.01
    fixed: Any = load_spec(name, ["model.at_evaluation.exit={kind: fixed, loops: 3}"]).model
    assert fixed.at_evaluation.fixed_loops == 3


def recipe_of(file: str, side: str, **fields: Any) -> dict[str, Any]:
    """Return the reported recipe of a side in a result file, with these fields."""
    path = Path(__file__).resolve().parents[2] / f"benchmarks/results/equal_compute_{file}.json"
    recipes = [run["recipe"] for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    (found,) = (
        recipe
        for recipe in recipes
        if recipe["seed"] == 1
        and bool(recipe["loops"]) == (side == "implicit")
        and fields.items() <= recipe.items()
    )
    return found


MEASURED = {
    "books_5m_residual": recipe_of("averaged_gates", "implicit"),
    "books_5m_residual_explicit": recipe_of("ablations", "explicit", layers=[0, 4, 0]),
    "books_10m_residual": recipe_of("averaged_10m_gates", "implicit", learning_rate=1e-3, loops=3),
    "books_10m_residual_explicit": recipe_of(
        "averaged_10m_stages", "explicit", learning_rate=1e-3, layers=[0, 4, 0]
    ),
    "books_5m_mamba2_residual": recipe_of("averaged_mamba2_stages", "implicit"),
    "books_5m_mamba2_residual_explicit": recipe_of(
        "averaged_mamba2_third_text", "explicit", layers=[0, 4, 0]
    ),
    "books_10m_mamba2_residual": recipe_of("averaged_mamba2_stages_10m", "implicit", weight_decay=1.5),
    "books_10m_mamba2_residual_explicit": recipe_of(
        "averaged_mamba2_stages_10m", "explicit", weight_decay=1.5, layers=[0, 4, 0]
    ),
}


LONG_AVERAGES = ("books_10m_residual_explicit", "books_10m_mamba2_residual_explicit")


@pytest.mark.parametrize("name", MEASURED)
def test_residual_models_on_repeated_text_are_those_that_were_measured_at_equal_compute(name: str) -> None:
    measured: Any = spec_of(Recipe.of(MEASURED[name]), Path("tokens"))
    spec: Any = load_spec(name)
    stacks, others = (one.model.stacks for one in (spec, measured))
    assert [layer for stack in stacks.values() for layer in stack.layers] == [
        layer for stack in others.values() for layer in stack.layers
    ]
    assert spec.model.kind == measured.model.kind
    assert (spec.model.d_model, spec.model.vocab_size) == (measured.model.d_model, measured.model.vocab_size)
    assert spec.model.residual_scaling == measured.model.residual_scaling
    assert spec.total_tokens == pytest.approx(measured.total_tokens, rel=0.01)
    assert spec.training.optimizer == measured.training.optimizer
    assert spec.schedule_spec() == measured.schedule_spec()
    averages = {"books_5m_residual": 0.997} | dict.fromkeys(LONG_AVERAGES, 0.999)
    assert spec.training.ema.decay == averages.get(name, 0.998)
    assert spec.training.max_grad_norm == measured.training.max_grad_norm
    assert spec.model.weight_norm == measured.model.weight_norm
    if spec.model.kind == "implicit_lm":
        assert stacks == others
        assert spec.model.injection == measured.model.injection
        ours, theirs = (
            [
                (one.last_step / run.total_steps, one.model.depth, one.model.gradient)
                for one in run.phase_specs()
            ]
            for run in (spec, measured)
        )
        assert [phase[1:] for phase in ours] == [phase[1:] for phase in theirs]
        assert [phase[0] for phase in ours] == pytest.approx([phase[0] for phase in theirs], abs=1e-3)


def test_late_loops_begin_after_three_quarters_of_the_steps() -> None:
    spec: Any = load_spec("sandwich_llama_130m")
    one, four = spec.phase_specs()[:2]
    assert (one.model.depth.loops, four.model.depth.loops, four.model.gradient.loops) == (1, 4, 2)
    assert one.last_step / spec.total_steps == pytest.approx(0.75, abs=1e-3)


OPTION = re.compile(r"model\.[\w.]+='[^']*'|model\.[\w.]+=[\w.-]+\w")


def options_in_comments() -> list[tuple[str, list[str]]]:
    """Return the specs whose comments, or whose base's, give options, with the options of each line."""
    folder = zoo_folder()
    assert folder is not None
    paths = {name: folder / f"{name}.yaml" for name in [*BOOKS, *SANDWICHES]}
    paths |= {"ouro_1.4b": folder / "base/ouro.yaml"}
    lines = [(name, line) for name, path in paths.items() for line in path.read_text().splitlines()]
    found = [(name, OPTION.findall(line)) for name, line in lines if line.startswith("#")]
    return [(name, [option.replace("'", "") for option in options]) for name, options in found if options]


@pytest.mark.parametrize(("name", "options"), options_in_comments())
def test_options_in_comments_change_valid_specs(name: str, options: list[str]) -> None:
    changed = load_spec(name, options).model
    assert changed != load_spec(name).model
    assert type(changed) is type(load_spec(name).model)


def test_every_new_spec_is_in_a_test_of_this_file() -> None:
    published = {name for name in zoo_names() if name.startswith(("attractor", "parcae", "huginn", "ouro"))}
    assert published == set(PUBLISHED) | {f"attractor_{size}_published" for size in ("140m", "370m", "770m")}
    assert {name for name in zoo_names() if name.startswith("sandwich")} == {
        name + suffix for name in SANDWICHES for suffix in ("", "_explicit")
    }
