"""The run specs of the word-problem studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, Mamba2Spec
from trainer.experiments.word_problem.settings import SETTINGS, changed
from trainer.experiments.word_problem.specs import NATIVE, require_model, vary_spec

BASE = "word_problem_s3_curriculum"


@pytest.mark.parametrize("model", NATIVE)
def test_model_names_determine_their_differences(model: str) -> None:
    spec: Any = vary_spec(BASE, model=model, layers=3)
    assert spec.model.n_layers == 3
    assert isinstance(spec.model, ImplicitLMSpec if model.startswith("implicit") else ExplicitLMSpec)
    assert spec.model.mixer.kind == ("attention" if model.endswith("llama") else "mamba2")
    assert (spec.model.mlp is None) == model.endswith("mamba2")


def test_every_model_sees_the_same_data_in_the_same_order() -> None:
    specs = [vary_spec(BASE, model=model, length=16) for model in (*NATIVE, "transformers:mamba2")]
    first, *others = (
        [(phase.first_step, phase.training.batch_size, phase.data) for phase in spec.phase_specs()]
        for spec in specs
    )
    assert all(other == first for other in others)
    assert {phase.training for phase in specs[0].phase_specs()} == {
        phase.training for phase in specs[-1].phase_specs()
    }


def test_phases_are_cut_to_the_training_length() -> None:
    lengths = [phase.data.seq_len for phase in vary_spec(BASE, model="mamba2", length=8).phase_specs()]
    assert lengths == [4, 8, 8, 8]


def test_train_p_and_iterations_apply_to_every_phase() -> None:
    spec = vary_spec(BASE, model="implicit-mamba2", identity_probability=0.9, iterations=20)
    phases: list[Any] = spec.phase_specs()
    assert [phase.data.identity_probability for phase in phases] == [0.9] * 4
    assert [phase.model.stopping.max_iterations for phase in phases] == [16, 20, 20, 20]
    steps: Any = vary_spec("word_problem_s3", model="implicit-mamba2", iterations=4).phase_specs()
    assert steps[0].model.gradient.steps == 4
    assert steps[1].model.gradient.steps == 4  # of phantom: no iterations of the search
    assert steps[1].model.stopping.max_iterations == 4


@pytest.mark.parametrize(
    "architecture", ["llama", "mamba2", "mamba", "gpt_neox", "gpt2", "opt", "rwkv", "mistral", "qwen3"]
)
def test_baselines_of_transformers_have_the_models_sizes(architecture: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec: Any = vary_spec(BASE, model=f"transformers:{architecture}", layers=2, group="A4")
    assert (spec.model.config["hidden_size"], spec.model.config["num_hidden_layers"]) == (64, 2)
    assert spec.model.vocab_size == 12
    assert 10_000 < spec.model.parameter_total() < 1_000_000


@pytest.mark.parametrize("group", ["S3", "A4", "A5", "S5", "Z7", "A5xZ2", "Z2xZ3"])
def test_the_group_sets_the_data_and_the_vocabulary(group: str) -> None:
    for model in ("implicit-mamba2", "mamba2"):
        spec: Any = vary_spec(BASE, model=model, group=group)
        assert spec.data.group == group
        assert spec.model.vocab_size == spec.data.vocab_size


def test_search_overrides_apply_only_to_implicit_models() -> None:
    changes = ["model.solver.damping=0.7", "phases.0.model.stopping.max_iterations=3", "phases.0.until=2"]
    changes += ["training.max_steps=9", "model.dropout=0.1"]
    specs: list[Any] = [vary_spec(BASE, model=model, overrides=changes) for model in NATIVE]
    for spec, model in zip(specs, NATIVE, strict=True):
        assert (spec.training.max_steps, spec.phases[0].until, spec.model.dropout) == (9, 2, 0.1)
        if model.startswith("implicit"):
            assert spec.model.solver.damping == 0.7
            assert spec.phase_specs()[0].model.stopping.max_iterations == 3
    with pytest.raises(ValueError, match="did you mean 'dropout'"):
        vary_spec(BASE, model="mamba2", overrides=["model.dropuot=0.1"])


def test_a_width_override_applies_to_all_models() -> None:
    change = ["model.d_model=128"]
    llama: Any = vary_spec(BASE, model="implicit-llama", overrides=change)
    assert (llama.model.d_model, llama.model.mixer.n_heads, llama.model.mlp.d_ff) == (128, 2, 341)
    pytest.importorskip("transformers", reason="transformers is not installed")
    baseline: Any = vary_spec(BASE, model="transformers:mamba2", overrides=change)
    assert baseline.model.config["hidden_size"] == 128
    with pytest.raises(ValueError, match=r"model\.d_model must be a positive integer, got 'wide'"):
        vary_spec(BASE, model="transformers:mamba2", overrides=["model.d_model=wide"])
    # A width and the heads that fit it are changed together.
    narrow: Any = vary_spec(BASE, model="mamba2", overrides=["model.d_model=8", "model.mixer.head_dim=8"])
    assert narrow.model.mixer.head_dim == 8
    assert baseline.model.config["num_heads"] * baseline.model.config["head_dim"] == 128 * 2


def test_incompatible_specs_are_rejected() -> None:
    with pytest.raises(ValueError, match="unknown model 'mamba3'; did you mean 'mamba2'"):
        require_model("mamba3")
    with pytest.raises(
        ValueError, match="llama_130m is a run on data of kind 'tokens'; use one on a word_problem"
    ):
        vary_spec("llama_130m", model="mamba2")
    # An explicit model under the name of an implicit one would be compared with itself.
    with pytest.raises(ValueError, match="kind 'explicit_lm', from which implicit-mamba2 cannot be derived"):
        vary_spec("word_problem_s3_explicit", model="implicit-mamba2")
    assert vary_spec("word_problem_s3_explicit", model="mamba2").model.kind == "explicit_lm"
    with pytest.raises(ValueError, match="kind 'transformers', from which mamba2 cannot be derived"):
        vary_spec("word_problem_s3_transformers", model="mamba2")
    with pytest.raises(ValueError, match="group 'B5' is not known"):
        vary_spec(BASE, model="mamba2", group="B5")
    with pytest.raises(ValueError, match="seq_len"):
        vary_spec(BASE, model="mamba2", length=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": ["Q8"]}, "group 'Q8' is not known"),
        ({"groups": []}, "groups must not be empty"),
        ({"models": ["rnn"]}, "unknown model 'rnn'"),
        ({"lengths": [8, 4, 8]}, "lengths contains 8 2 times; give each value once"),
        ({"seeds": [0, 0]}, "seeds contains 0 2 times"),
        ({"lengths": [0]}, "lengths must be at least 1, got 0"),
        ({"test_lengths": [0]}, "test_lengths must be at least 1, got 0"),
        ({"iterations": [0]}, "iterations must be at least 1, got 0"),
        ({"layers": [-1]}, "layers must be at least 1, got -1"),
        ({"test_p": [1.5]}, "p must be from 0 to 1, got 1.5"),
        ({"train_p": -0.1}, "p must be from 0 to 1, got -0.1"),
        ({"threshold": 0.0}, "threshold must be above 0 and at most 1, got 0"),
        ({"sequences": 0}, "sequences must be at least 1, got 0"),
        ({"token_iterations": 0}, "token_iterations must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(SETTINGS["layers", "laptop"], changes)


@pytest.mark.parametrize("named", SETTINGS, ids="-".join)
def test_the_settings_are_in_range(named: tuple[str, str]) -> None:
    settings = SETTINGS[named]
    settings.require()
    assert settings.groups


def test_explicit_models_start_with_mamba2s_usual_heads() -> None:
    usual = {name: field.default for name, field in Mamba2Spec.model_fields.items()}
    for model, soon in (("implicit-mamba2", True), ("mamba2", False)):
        mixer: Any = vary_spec("word_problem_a5", model=model).model.mixer  # type: ignore[attr-defined]  # of both kinds
        assert (mixer.dt_min, mixer.a_max) == ((0.1, 4) if soon else (usual["dt_min"], usual["a_max"]))
    changed_back: Any = vary_spec("word_problem_a5", model="mamba2", overrides=["model.mixer.dt_min=0.05"])
    assert changed_back.model.mixer.dt_min == 0.05


def test_all_sources_of_a_mixture_are_changed() -> None:
    spec: Any = vary_spec("word_problem_a5_mixed", model="mamba2", group="A4", length=16, seed=3)
    assert (spec.data.seq_len, spec.model.vocab_size, spec.training.seed) == (16, 12, 3)
    assert {(source.data.group, source.data.seq_len) for source in spec.data.sources} == {("A4", 16)}
    assert [source.data.identity_probability for source in spec.data.sources] == [0.9, 0.5, 0.2]


def test_a_mixture_of_texts_is_rejected(tmp_path: Path) -> None:
    spec = tmp_path / "texts.yaml"
    spec.write_text(
        "extends: word_problem_a5_mixed\n"
        "data: {sources: [{weight: 1, data: {kind: tokens}}]}\nmodel: {vocab_size: 60}\n"
    )
    with pytest.raises(ValueError, match="is a run on data of kind 'mixture'; use one on a word_problem"):
        vary_spec(str(spec), model="mamba2")


def test_the_long_recipe_never_sees_its_test_at_half_hard_tokens() -> None:
    """Length 1024 at p = 0.5 is an extrapolation in length and in the share of hard tokens."""
    phases: list[Any] = vary_spec("word_problem_a5_long", model="implicit-mamba2").phase_specs()
    assert [phase.data.seq_len for phase in phases] == [4, 32, 32, 32, 128, 32, 256, 32, 256]
    assert all(min(phase.data.identity_probability) >= 0.9 for phase in phases if phase.data.seq_len > 32)
    penalized = [phase.name for phase in phases if phase.model.gradient.kind == "jacobian_penalty"]
    assert penalized == [phase.name for phase in phases[3:]]
