"""Language models of transformers: reading with equal logits, writing back, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.hf import pretrained
from implicit_blocks.hf.folders import read_pretrained
from implicit_blocks.hf.pretrained_export import export_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402  # after the skip

COMMON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.1}
ATTENTION = COMMON | {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = ATTENTION | {"num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MAMBA2 = COMMON | {"num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "chunk_size": 8}

MODELS = {
    "llama": ("llama", ATTENTION),
    "llama-biases-llama3": (
        "llama",
        GROUPED | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "mistral": ("mistral", GROUPED | {"sliding_window": None, "head_dim": 12}),
    "mistral-long-window": ("mistral", GROUPED | {"sliding_window": 64, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2-tied": ("qwen2", ATTENTION | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen3-tied-biases": (
        "qwen3",
        GROUPED | {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-tied": ("mamba2", MAMBA2 | {"n_groups": 1, "tie_word_embeddings": True, "use_bias": True}),
}


def original(name, dtype=torch.float32):
    """Return a random model of transformers, all of whose vectors and biases matter for the logits."""
    model_type, fields = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def saved(folder: Path, model, **options):
    model.save_pretrained(folder, **options)
    return folder


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def explicit(folder):
    found = read_pretrained(folder)
    library = ib.build(found.spec)
    library.load_state_dict(found.state)
    return library.eval()


@pytest.fixture
def ids():
    return torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_the_explicit_model_has_the_original_s_logits(name, tmp_path, ids):
    model = original(name)
    library = explicit(saved(tmp_path, model))
    assert library.spec.kind == "explicit_lm"
    torch.testing.assert_close(logits_of(library, ids), logits_of(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mamba2"])
def test_sharded_folders_are_read(name, tmp_path, ids):
    model = original(name)
    saved(tmp_path, model, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    torch.testing.assert_close(logits_of(explicit(tmp_path), ids), logits_of(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_weights_of_another_type_are_read_without_rounding(name, dtype, tmp_path, ids):
    found = read_pretrained(saved(tmp_path, original(name, dtype)))
    assert {tensor.dtype for tensor in found.state.values()} == {dtype}
    library = ib.build(found.spec)
    library.load_state_dict(found.state)
    wide = torch.promote_types(dtype, torch.float32)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wide), ids)
    torch.testing.assert_close(logits_of(library.to(wide).eval(), ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_windows_do_not_change_the_logits(name, tmp_path, ids):
    library = explicit(saved(tmp_path, original(name)))
    with torch.no_grad():
        stepwise = library(ids, window_length=7).logits
    torch.testing.assert_close(stepwise, logits_of(library, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_equals_the_original_s(name, tmp_path, ids):
    model = original(name)
    saved(tmp_path / "theirs", model)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("name", MODELS)
def test_an_explicit_model_is_written_back_to_its_class(name, tmp_path, ids):
    model = original(name)
    saved(tmp_path / "theirs", model)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "original"]) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    expected_type = MODELS[name][0].replace("mistral", "llama")  # which computes the same
    assert back.config.model_type == expected_type
    assert back.config.eos_token_id == model.config.eos_token_id
    torch.testing.assert_close(logits_of(back, ids), logits_of(model, ids), atol=1e-6, rtol=0)
    theirs, ours = model.state_dict(), back.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in theirs.items())


def test_an_exported_run_is_read_again_in_its_original_class(tmp_path, ids):
    """An export states the length of training, which configurations of transformers do not have."""
    spec = ib.load_spec(
        "shakespeare",
        ["model.kind=explicit_lm", "model.vocab_size=61", "model.d_model=32", "model.weight_norm=false",
         "data={kind: tokens, seq_len: 32}"],
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(spec.model_dump_json())
    assert main(["export", str(tmp_path / "run.yaml"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "original"]) == 0
    expected = logits_of(ib.load_model(tmp_path / "ours"), ids)
    torch.testing.assert_close(logits_of(ib.load_model(tmp_path / "back"), ids), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "implicit_lm"}, "implicit_lm"),
        ({"weight_norm": True}, "weight_norm (True)"),
        ({"mixer": {"kind": "attention", "n_heads": 4, "qk_norm": "unweighted"}}, "mixer.qk_norm"),
        ({"mixer": {"kind": "attention", "n_heads": 4, "clip_qkv": 8.0}}, "mixer.clip_qkv (8.0)"),
        ({"mlp": None}, "mlp None"),
    ],
)
def test_specs_that_no_class_can_express_are_refused(changes, named):
    fields = {"kind": "explicit_lm", "vocab_size": 61, "d_model": 32, "n_layers": 2}
    fields |= {"mixer": {"kind": "attention", "n_heads": 4}, "mlp": {"kind": "swiglu", "d_ff": 48}}
    fields |= changes
    spec = {"explicit_lm": ib.ExplicitLMSpec, "implicit_lm": ib.ImplicitLMSpec}[fields["kind"]](**fields)
    with pytest.raises(ValueError, match="transformers") as refused:
        export_config(spec)
    assert named in str(refused.value)


def config_of(name, **changes):
    model_type, fields = MODELS[name]
    return AutoConfig.for_model(model_type, **fields).to_dict() | changes


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mistral", {"sliding_window": 32}, ["sliding_window is 32", "max_position_embeddings 64"]),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 32, "layer_types": None, "max_window_layers": 1},
            ["sliding_window is 32"],
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 2,
            },
            ["sliding_window is 8"],
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, ["layer_types has chunked_attention"]),
        ("mistral", {"attention_bias": True}, ["attention_bias is True"]),
        ("qwen2", {"mlp_bias": True}, ["mlp_bias is True"]),
        ("llama", {"attention_dropout": 0.1}, ["attention_dropout is 0.1", "set it to 0"]),
        ("qwen3", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type is 'yarn'"]),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters has no 'factor'"]),
        (
            "llama",
            {"rope_parameters": {"mrope_section": [1, 2]}},
            ["rope_parameters.mrope_section is [1, 2]"],
        ),
        ("mamba2", {"rms_norm": False}, ["rms_norm is False"]),
        (
            "llama",
            {"mystery": 3, "quantization_config": {"bits": 4}},
            ["mystery is 3", "quantization_config"],
        ),
        (
            "qwen3",
            {"mystery": 3, "hidden_act": "gelu", "vocab_size": None},
            ["mystery is 3", "hidden_act", "has no 'vocab_size'"],
        ),
    ],
)
def test_unsupported_values_and_unknown_fields_are_all_named(name, changes, named):
    with pytest.raises(ValueError, match="cannot be converted") as refused:
        pretrained.import_spec(config_of(name, **changes))
    assert [part for part in named if part not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "attention_bias": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}),  # from layer 28 on
        ("mistral", {"sliding_window": 64}),
        ("llama", {"hidden_act": "swish", "mystery": None, "sliding_window": None}),
        ("llama", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "default"}}),
    ],
)
def test_values_without_effect_are_accepted(name, changes):
    assert pretrained.import_spec(config_of(name, **changes)) == pretrained.import_spec(config_of(name))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_missing_fields_have_the_defaults_of_transformers(name):
    """The defaults differ between the types, for instance 8 or 32 heads of keys and values."""
    model_type = MODELS[name][0]
    least = {"model_type": model_type, "vocab_size": 61, "hidden_size": 512, "intermediate_size": 64}
    least |= {"num_hidden_layers": 2, "num_attention_heads": 32, "sliding_window": None}
    if model_type == "llama":
        del least["sliding_window"]
    filled = AutoConfig.for_model(**least).to_dict()
    assert pretrained.import_spec(least).mixer.n_kv_heads in (None, filled["num_key_value_heads"])
    ours, theirs = pretrained.import_spec(least), pretrained.import_spec(filled)
    width = theirs.mixer.head_width(512)
    assert ours.mixer.injection_width(512) == theirs.mixer.injection_width(512)
    assert (ours.mixer.head_width(512), ours.norm_eps, ours.tie_embeddings) == (width, 1e-6, False)
    assert ours.mixer.rope_theta == theirs.mixer.rope_theta == 10_000.0


def test_mistral_s_default_window_counts_if_the_field_is_missing():
    config = config_of("mistral", max_position_embeddings=8192)
    del config["sliding_window"]
    with pytest.raises(ValueError, match="sliding_window is 4096"):
        pretrained.import_spec(config)


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    saved(tmp_path, original("qwen3"))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit") as refused:
        read_pretrained(tmp_path)
    message = str(refused.value)
    assert "backbone.layers.1.mixer.q_norm.weight is missing" in message
    assert "backbone.layers.0.mixer.q_proj.weight is unknown" in message
    assert "backbone.layers.0.mixer.sinks is unknown" in message


def test_the_command_reports_every_unsupported_field(tmp_path, capsys):
    saved(tmp_path / "theirs", original("qwen2"))
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text()) | {"hidden_act": "relu", "mystery": 1}
    path.write_text(json.dumps(config))
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    message = capsys.readouterr().err
    assert "hidden_act is 'relu'" in message
    assert "mystery is 1" in message
    assert not (tmp_path / "ours").exists()
