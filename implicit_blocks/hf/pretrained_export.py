"""Explicit models as configurations of the language models of transformers: the reverse of ``pretrained``."""

from __future__ import annotations

from typing import Any

from implicit_blocks.hf.pretrained import import_spec
from implicit_blocks.specs import AttentionSpec, ExplicitLMSpec, Mamba2Spec, SwiGLUSpec

_CLASSES = {"llama": "Llama", "mamba2": "Mamba2", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Of initialization, training and speed; and the vocabulary, which is exported with its padding.
_BESIDE = ("embedding_std", "scale_residual_init", "dropout", "vocab_size", "pad_vocab_to")
_OF_A_MIXER = {"a_min", "a_max", "chunk_size"}


def export_config(spec: Any) -> dict[str, Any]:
    """Return the ``config.json`` of the class of transformers that computes an explicit model's function.

    The class is Mamba2, Qwen2 (biases of q, k and v), Qwen3 (norms of q and k), or Llama, which also computes
    what Mistral computes.

    Raises:
        ValueError: the model is not explicit, or no class can express its spec; lists the fields.

    """
    if not isinstance(spec, ExplicitLMSpec):
        raise ValueError(
            f"a model of kind {getattr(spec, 'kind', None)!r} has no original class in transformers; only "
            "explicit models, which have no loop, have one: choose another format"
        )
    if isinstance(spec.mixer, Mamba2Spec):
        config = _mamba2(spec, spec.mixer)
    elif isinstance(spec.mixer, AttentionSpec) and isinstance(spec.mlp, SwiGLUSpec):
        config = _transformer(spec, spec.mixer, spec.mlp)
    else:
        raise ValueError(
            f"no class of transformers has mixer {getattr(spec.mixer, 'kind', None)!r} with mlp "
            f"{getattr(spec.mlp, 'kind', None)!r}; use attention with swiglu, or mamba2 without an MLP"
        )
    config |= {
        "architectures": [f"{_CLASSES[config['model_type']]}ForCausalLM"],
        "hidden_size": spec.d_model,
        "initializer_range": spec.embedding_std,
        "num_hidden_layers": spec.n_layers,
        "tie_word_embeddings": spec.tie_embeddings,
        "vocab_size": spec.padded_vocab_size,
    }
    lost = _differences(spec, import_spec(config))
    if lost:
        raise ValueError(
            f"{config['architectures'][0]} of transformers cannot express these fields of the spec: "
            + ", ".join(lost)
            + "; keep the format of this library, or change them (--fold-weight-norm removes weight norm)"
        )
    return config


def _transformer(spec: ExplicitLMSpec, mixer: AttentionSpec, mlp: SwiGLUSpec) -> dict[str, Any]:
    normed = mixer.qk_norm == "weighted"
    scaling = {} if mixer.rope_scaling is None else mixer.rope_scaling.model_dump()
    config: dict[str, Any] = {
        "model_type": "qwen3" if normed else "qwen2" if mixer.bias == "qkv" else "llama",
        "attention_dropout": 0.0,
        "head_dim": mixer.head_width(spec.d_model),
        "hidden_act": "silu",
        "intermediate_size": mlp.d_ff,
        "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": mixer.n_kv_heads or mixer.n_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_theta": mixer.rope_theta, "rope_type": "default"} | scaling,
    }
    if config["model_type"] == "llama":
        config["mlp_bias"] = mlp.bias
    if config["model_type"] != "qwen2":
        config["attention_bias"] = mixer.bias is True
    if scaling.get("rope_type") == "linear":
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            del config["rope_parameters"][name]
    return config


def _mamba2(spec: ExplicitLMSpec, mixer: Mamba2Spec) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        "chunk_size": mixer.chunk_size,
        "conv_kernel": mixer.d_conv,
        "expand": mixer.expand,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "layer_norm_epsilon": spec.norm_eps,
        "n_groups": mixer.n_groups,
        "num_heads": mixer.expand * spec.d_model // mixer.head_dim,
        "state_size": mixer.d_state,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": mixer.dt_max,
        "time_step_min": mixer.dt_min,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
    }


def _differences(spec: ExplicitLMSpec, again: ExplicitLMSpec) -> list[str]:
    """Return the fields that the exported configuration would lose, with their values."""
    lost = []
    ours, theirs = _function(spec), _function(again)
    for name, value in ours.items():
        if isinstance(value, dict) and isinstance(theirs[name], dict):
            lost += [
                f"{name}.{key} ({part!r})" for key, part in value.items() if theirs[name].get(key) != part
            ]
        elif value != theirs[name]:
            lost.append(f"{name} ({value!r})")
    return lost


def _function(spec: ExplicitLMSpec) -> dict[str, Any]:
    """Return the fields that determine the function, in one form where several have the same meaning."""
    fields = {name: value for name, value in spec.model_dump().items() if name not in _BESIDE}
    mixer = spec.mixer.portable().model_dump(exclude=_OF_A_MIXER)
    if isinstance(spec.mixer, AttentionSpec):
        mixer["head_dim"] = spec.mixer.head_width(spec.d_model)
        mixer["n_kv_heads"] = spec.mixer.n_kv_heads or spec.mixer.n_heads
    if isinstance(spec.mixer, Mamba2Spec):
        mixer["norm_groups"] = spec.mixer.norm_groups or spec.mixer.n_groups
    return fields | {"mixer": mixer}
