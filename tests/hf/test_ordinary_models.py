"""Language models of transformers: equal logits, and initialization of an implicit model."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.hf import pretrained as ordinary
from implicit_blocks.hf.folders import read_pretrained, to_library

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (  # noqa: E402  # after the skip
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
}
LLAMA |= {"num_attention_heads": 4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MAMBA2 = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "chunk_size": 8,
}
MAMBA2 |= {"num_hidden_layers": 2}

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA),
    "llama-grouped-tied": (
        LlamaForCausalLM,
        LlamaConfig,
        LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama-biases-llama3": (
        LlamaForCausalLM,
        LlamaConfig,
        LLAMA | {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, LLAMA | {"num_key_value_heads": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, LLAMA | {"num_key_value_heads": 2, "head_dim": 12}),
    "mamba2-one-group": (Mamba2ForCausalLM, Mamba2Config, MAMBA2 | {"n_groups": 1, "use_conv_bias": False}),
    "mamba2-groups-biases": (
        Mamba2ForCausalLM,
        Mamba2Config,
        MAMBA2 | {"n_groups": 2, "use_bias": True, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": True},
    ),
}


def ordinary_model(name):
    """Every vector is perturbed, so that losing one changes the logits."""
    model_class, config_class, fields = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def first_iterate(library, ids):
    """Return the output after one step, without the additional call of an evaluation."""
    once = {"gradient": ib.UnrolledSpec(steps=1), "solver": ib.PicardSpec()}
    library.reconfigure(library.spec.model_copy(update=once))
    return library.train()(ids).logits.detach()


@pytest.mark.parametrize("name", MODELS)
def test_the_explicit_twin_and_the_start_have_equal_logits(name, tmp_path):
    model = ordinary_model(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ids = torch.randint(61, (2, 40))
    with torch.no_grad():
        expected = model(ids).logits
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "explicit")]) == 0
    explicit = AutoModelForCausalLM.from_pretrained(tmp_path / "explicit")
    assert explicit.config.model_spec.kind == "explicit_lm"
    assert explicit.config.eos_token_id == model.config.eos_token_id
    with torch.no_grad():
        torch.testing.assert_close(explicit(ids).logits, expected, atol=1e-4, rtol=0)
        stepwise = explicit(ids, window_length=7).logits
        torch.testing.assert_close(stepwise, expected, atol=1e-4, rtol=0)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "start"), "--implicit"]) == 0
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    spec = start.config.model_spec
    assert (spec.kind, spec.start.kind, spec.weight_norm) == ("implicit_lm", "embedding", True)
    torch.testing.assert_close(first_iterate(to_library(start), ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("weight_norm", [True, False])
def test_an_initialized_model_trains(weight_norm, tmp_path):
    """Zero rows, as in pruned or padded models, have no direction."""
    model = ordinary_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[3] = 0
    model.save_pretrained(tmp_path)
    found = read_pretrained(tmp_path)
    spec, state = ordinary.as_start(found.spec, found.state, weight_norm=weight_norm)
    implicit = ib.build(spec)
    implicit.load_state_dict(state)
    ids = torch.randint(61, (2, 10))
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(first_iterate(implicit, ids), expected, atol=1e-4, rtol=0)
    implicit.train()(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in implicit.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    injection = [g.abs().max() for name, g in gradients.items() if name.startswith("injection.proj")]
    assert max(injection) > 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "a token depends on later tokens",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "supported: default, linear, llama3",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"model_type": "gpt2"}, "unknown model_type 'gpt2'"),
        ("mamba2-one-group", {"time_step_limit": [0.0, 0.5]}, "time_step_limit"),
        ("mamba2-one-group", {"num_heads": 3}, "must equal num_heads"),
    ],
)
def test_values_that_no_spec_can_express_are_refused(name, changes, message):
    _, config_class, fields = MODELS[name]
    with pytest.raises(ValueError, match=message):
        ordinary.import_spec(config_class(**fields).to_dict() | changes)


def test_the_field_names_of_older_configurations_are_read():
    _, config_class, fields = MODELS["llama-biases-llama3"]
    config = config_class(**fields).to_dict()
    parameters = dict(config.pop("rope_parameters"))
    older = config | {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    assert ordinary.import_spec(older) == ordinary.import_spec(config_class(**fields).to_dict())
    required = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    least = {name: older[name] for name in (*required, "num_attention_heads")}
    assert ordinary.import_spec(least).mixer == ib.AttentionSpec(n_heads=4, rope_theta=10_000.0)
    del least["hidden_size"]
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        ordinary.import_spec(least)
