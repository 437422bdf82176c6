"""Retrofit: layers of a pretrained model as the core of a sandwich that starts as the same function."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.hf.folders import PretrainedFolder, read_pretrained, write_transformers
from implicit_blocks.models.retrofit import parse_core, retrofit

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402  # after the skip

COMMON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "initializer_range": 0.1}
ATTENTION = COMMON | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": ATTENTION,
    "qwen2": ATTENTION | {"tie_word_embeddings": True},
    "qwen3": ATTENTION | {"head_dim": 16},
    "mistral": ATTENTION | {"sliding_window": None},
    "mamba2": COMMON | {"num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "chunk_size": 8},
}
CORES = [(1, 3), (0, 2), (2, 4), (0, 4), (1, 2)]


@pytest.fixture(scope="module", params=MODELS)
def original(request, tmp_path_factory):
    """Return a random model of transformers, whose vectors and biases all matter, and its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def ids():
    return torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))


def built(folder, first, stop):
    found = read_pretrained(folder)
    spec, state = retrofit(found.spec, found.state, first, stop)
    model = ib.build(spec)
    model.load_state_dict(state)
    return model.eval()


def logits_of(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


@pytest.mark.parametrize(("first", "stop"), CORES)
def test_the_sandwich_has_the_original_s_logits_at_any_number_of_loops(first, stop, original, ids):
    model, folder = original
    sandwich = built(folder, first, stop)
    assert (sandwich.spec.n_layers, sandwich.spec.injection.kind) == (stop - first, "residual")
    expected = logits_of(model, ids)
    for options in ({}, {"loops": 1}, {"loops": 2}, {"loops": 5}, {"window_length": 7}):
        torch.testing.assert_close(logits_of(sandwich, ids, **options), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits_of(sandwich.train(), ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scaling", ["layer_scale", "bounded_gate", "deepnorm"])
def test_scaled_branches_keep_their_function(scaling, ids):
    """The default factor of DeepNorm depends on the number of layers, which differs between the stacks."""
    torch.manual_seed(0)
    fields = {"vocab_size": 61, "d_model": 16, "n_layers": 6, "embedding_std": 1.0}
    layers = {"mixer": ib.AttentionSpec(n_heads=2), "residual_scaling": {"kind": scaling}}
    original = ib.build(ib.ExplicitLMSpec(**fields, **layers)).double().eval()
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if name.endswith("gamma"):
                parameter.normal_()
    spec, state = retrofit(original.spec, original.state_dict(), 1, 3)
    sandwich = ib.build(spec).double().eval()
    sandwich.load_state_dict(state)
    for loops in (1, 3):
        torch.testing.assert_close(logits_of(sandwich, ids, loops=loops), logits_of(original, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gate_has_the_type_of_the_weights(dtype, original, tmp_path):
    model, _ = original
    model_class = type(model)
    half = model_class.from_pretrained(original[1], dtype=dtype)
    half.save_pretrained(tmp_path)
    found = read_pretrained(tmp_path)
    _, state = retrofit(found.spec, found.state, 1, 3)
    assert state["injection.gate"].dtype == dtype


def test_every_parameter_has_a_gradient_and_one_step_opens_the_gate(original, ids):
    sandwich = built(original[1], 1, 3).train()
    optimizer = torch.optim.SGD(sandwich.parameters(), lr=0.1)
    before = sandwich(ids, labels=ids).loss
    before.backward()
    gradients = {name: parameter.grad for name, parameter in sandwich.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []
    optimizer.step()
    assert sandwich.injection.gate.abs().max() > 0
    assert sandwich(ids, labels=ids).loss < before
    once, often = (logits_of(sandwich.eval(), ids, loops=loops) for loops in (1, 4))
    assert (once - often).abs().max() > 1e-6


def test_the_names_of_the_layers_follow_their_stacks(original):
    found = read_pretrained(original[1])
    spec, state = retrofit(found.spec, found.state, 1, 3)
    assert (spec.prelude.n_layers, spec.n_layers, spec.coda.n_layers) == (1, 2, 1)
    assert torch.equal(
        state["prelude.layers.0.mixer.out_proj.weight"],
        found.state["backbone.layers.0.mixer.out_proj.weight"],
    )
    assert torch.equal(
        state["backbone.layers.1.mixer_norm.weight"], found.state["backbone.layers.2.mixer_norm.weight"]
    )
    assert torch.equal(
        state["coda.layers.0.mixer_norm.weight"], found.state["backbone.layers.3.mixer_norm.weight"]
    )
    assert torch.equal(state["norm.weight"], found.state["backbone.norm.weight"])
    assert not state["injection.gate"].any()
    whole, _ = retrofit(found.spec, found.state, 0, 4)
    assert (whole.prelude, whole.n_layers, whole.coda) == (None, 4, None)


def test_the_command_writes_a_sandwich_that_loads_generates_and_saves(original, ids, tmp_path):
    model, folder = original
    assert main(["convert", str(folder), str(tmp_path / "sandwich"), "--core", "1:3"]) == 0
    sandwich = AutoModelForCausalLM.from_pretrained(tmp_path / "sandwich")
    injection = sandwich.config.model_spec.injection
    assert (injection.kind, injection.gate_init) == ("residual", 0.0)
    torch.testing.assert_close(logits_of(sandwich, ids), logits_of(model, ids), atol=1e-5, rtol=0)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(sandwich.generate(ids, attention_mask=mask, **options), expected)
    with torch.no_grad():
        next(p for name, p in sandwich.named_parameters() if name.endswith("injection.gate")).fill_(0.3)
    opened = logits_of(sandwich, ids)
    assert (opened - logits_of(model, ids)).abs().max() > 1e-4
    sandwich.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits_of(again, ids), opened, atol=0, rtol=0)
    torch.testing.assert_close(logits_of(ib.load_model(tmp_path / "again"), ids), opened, atol=1e-6, rtol=0)


def explicit(**changes):
    fields = {"vocab_size": 19, "d_model": 16, "n_layers": 4, "mixer": ib.AttentionSpec(n_heads=2)}
    return ib.ExplicitLMSpec(**fields | changes)


def test_a_pattern_of_layers_is_divided(ids):
    mamba = {"mixer": ib.Mamba2Spec(d_state=4, head_dim=8, chunk_size=4)}
    attention = {"mixer": ib.AttentionSpec(n_heads=2)}
    spec = ib.ExplicitLMSpec(vocab_size=61, d_model=16, n_layers=4, layers=(mamba, mamba | attention))
    model = ib.build(spec).eval()
    for first, stop in ((1, 3), (0, 1), (3, 4)):
        divided, state = retrofit(spec, model.state_dict(), first, stop)
        sandwich = ib.build(divided)
        sandwich.load_state_dict(state)
        expected = logits_of(model, ids)
        torch.testing.assert_close(logits_of(sandwich.eval(), ids), expected, atol=1e-5, rtol=0)


def test_weight_norm_is_folded_before_the_layers_are_divided(tmp_path, ids):
    spec = explicit(vocab_size=61, mlp=ib.SwiGLUSpec(d_ff=24), weight_norm=True)
    model = ib.build(spec).eval()
    write_transformers(PretrainedFolder(spec, model.state_dict()), tmp_path / "explicit")
    arguments = ["convert", str(tmp_path / "explicit"), str(tmp_path / "sandwich"), "--core", "1:3"]
    assert main(arguments) == 2
    assert main([*arguments, "--fold-weight-norm"]) == 0
    sandwich = ib.load_model(tmp_path / "sandwich").eval()
    torch.testing.assert_close(logits_of(sandwich, ids), logits_of(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("first", "stop", "named"),
    [
        (1, 5, ["1:5 is outside", "4 layers", "STOP ≤ 4"]),
        (-1, 2, ["-1:2 is outside"]),
        (2, 2, ["2:2 is empty", "STOP above 2"]),
        (3, 1, ["3:1 is empty"]),
    ],
)
def test_cores_outside_the_layers_or_empty_are_refused(first, stop, named):
    with pytest.raises(ValueError, match="core") as refused:
        retrofit(explicit(), {}, first, stop)
    assert [part for part in named if part not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (explicit(weight_norm=True), "--fold-weight-norm"),
        (explicit(prelude={"n_layers": 1}), "has prelude"),
        (ib.ImplicitLMSpec(vocab_size=19, d_model=32, n_layers=4, mixer=ib.Mamba2Spec()), "implicit_lm"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(spec, named):
    with pytest.raises(ValueError, match=named):
        retrofit(spec, {}, 1, 3)


def test_a_core_in_another_notation_is_refused(original, tmp_path, capsys):
    assert parse_core("4:12") == (4, 12)
    for text in ("4", "4-12", "a:b", "1:2:3", ":3"):
        with pytest.raises(ValueError, match="expected FIRST:STOP"):
            parse_core(text)
    arguments = ["convert", str(original[1]), str(tmp_path / "sandwich")]
    assert main([*arguments, "--core", "3:9"]) == 2
    assert "3:9 is outside the model's 4 layers" in capsys.readouterr().err
    assert main([*arguments, "--core", "1:3", "--implicit"]) == 2
    assert "give one of the two" in capsys.readouterr().err
    assert main([*arguments, "--core", "1:3", "--to", "original"]) == 2
    assert "no original class" in capsys.readouterr().err
    assert not (tmp_path / "sandwich").exists()
