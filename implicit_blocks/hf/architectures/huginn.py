"""Huginn (2502.05171): prelude, a core that reads its state and the prelude's output side by side, and coda.

Format of https://github.com/seal-rg/recurrent-pretraining, recpre/raven_modeling_minimal.py, and of the
checkpoints with model type ``huginn_raven``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, sqrt
from typing import Any

from implicit_blocks.hf.architectures.base import Architecture, Reading
from implicit_blocks.hf.architectures.fields import PublishedFields
from implicit_blocks.hf.architectures.tensor_map import (
    Heads,
    Rule,
    TensorMap,
    Unused,
    rename,
    rotation_table,
    split_rows,
)
from implicit_blocks.specs import AttentionSpec, ImplicitLMSpec, SwiGLUSpec

MODEL_TYPE = "huginn_raven"
_LAYERS = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")


class HuginnFormat(Architecture):
    """``z ← core(W [z; e])`` from noise; the final norm also precedes the coda."""

    name = "huginn"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Recognize the model type, or the fields that only this format has."""
        return config.get("model_type") == MODEL_TYPE or (
            "n_layers_in_recurrent_block" in config and "n_heads" in config
        )

    def read(self, config: Mapping[str, Any]) -> Reading:
        """Return the spec; evaluation takes ``mean_recurrence`` loops."""
        fields = PublishedFields(config, name="Huginn")
        width, heads = fields.integer("n_embd", 5280), fields.integer("n_heads", 55)
        if width % heads or width // heads % 2:
            fields.complain("n_heads", f"n_embd {width} must be a multiple, with heads of an even width")
        prelude, core, coda = (
            fields.layers(name, default, minimum=minimum)
            for name, default, minimum in zip(_LAYERS, (2, 4, 2), (0, 1, 0), strict=True)
        )
        _constants(fields, width, heads)
        vocab = fields.integer("vocab_size", 65536)
        fields.ignore({"padding_multiple": "not read: the rows of the embedding are vocab_size"})
        fields.require(
            "padded_vocab_size", vocab, reason="expected vocab_size, as the published code sets it"
        )
        tied, bias = fields.flag("tie_embeddings", True), fields.flag("bias", False)
        fields.require("tie_word_embeddings", tied, reason="expected the value of tie_embeddings")
        qk_bias = fields.flag("qk_bias", True)
        base, eps = fields.number("rope_base", 50_000.0), fields.number("norm_eps", 1e-6)
        d_ff, length = fields.integer("intermediate_size", 17920), fields.integer("block_size", 4096)
        mean, backprop = fields.integer("mean_recurrence", 32), fields.integer("mean_backprop_depth", 8)
        std, scale = _initial_values(fields, width)
        fields.check()
        stack = {
            "kind": "attention",
            "n_heads": heads,
            "rope_theta": base,
            "bias": "qk" if qk_bias else False,
        }
        spec = {
            "vocab_size": vocab,
            "d_model": width,
            "n_layers": core,
            "mixer": stack,
            "mlp": {"kind": "swiglu", "d_ff": d_ff},
            "norm_eps": eps,
            "tie_embeddings": tied,
            "embedding_std": std,
            "embedding_scale": scale,
            "weight_norm": False,
            "norm_placement": "pre_post",
            "core_norm": False,
            "norm_before_coda": True,
            "prelude": {"n_layers": prelude} if prelude else None,
            "coda": {"n_layers": coda} if coda else None,
            "injection": {"kind": "concat", "bias": bias},
            "z_init": {"kind": "normal", "std": std * scale, "truncation": 3.0},
            "depth": {"kind": "log_normal_poisson", "mean": float(mean), "sigma": 0.5, "per": "batch"},
            "gradient": {"kind": "last_loops", "loops": backprop},
            "state_policy": "per_loop",
            "at_evaluation": {
                "exit": {"kind": "fixed", "loops": mean},
                "solver": {"kind": "picard", "damping": 1.0},
            },
        }
        names = ["prelude"] * prelude + ["core_block"] * core + ["coda"] * coda
        rotations = rotation_table(length, width=width // heads, base=base)
        rules = _rules(names, Heads(heads, heads, width // heads), tied=tied, bias=bias, qk_bias=qk_bias)
        copies = {"lm_head.weight": "transformer.wte.weight"} if tied else {}
        tensors = TensorMap(tuple(rules), copies, (Unused("freqs_cis", rotations),))
        return Reading(spec, tensors, (), {"max_position_embeddings": length, **_tokens(config)})

    def describes(self, spec: ImplicitLMSpec) -> bool:
        """Return whether the injection is a concatenation, and the final norm also precedes the coda."""
        return spec.injection.kind == "concat" and spec.norm_before_coda and not spec.core_projection

    def write(self, spec: ImplicitLMSpec) -> dict[str, Any]:
        """Return the configuration."""
        mixer, mlp = spec.mixer, spec.mlp
        if not isinstance(mixer, AttentionSpec) or not isinstance(mlp, SwiGLUSpec):
            raise ValueError("the format has attention and SwiGLU only")
        if not isclose(spec.embedding_scale, sqrt(spec.d_model)):
            raise ValueError(f"embedding_scale is {spec.embedding_scale}; the format has √d_model")
        mean = _loops(spec)
        prelude, coda = spec.prelude, spec.coda
        layers = (
            0 if prelude is None else prelude.n_layers,
            spec.n_layers,
            0 if coda is None else coda.n_layers,
        )
        return {
            "model_type": MODEL_TYPE,
            "architectures": ["RavenForCausalLM"],
            "n_embd": spec.d_model,
            "n_heads": mixer.n_heads,
            "n_layers": sum(layers),
            **dict(zip(_LAYERS, layers, strict=True)),
            "block_size": 4096,
            "vocab_size": spec.padded_vocab_size,
            "padding_multiple": 1,
            "tie_embeddings": spec.tie_embeddings,
            "tie_word_embeddings": spec.tie_embeddings,
            "intermediate_size": mlp.d_ff,
            "bias": spec.injection.model_dump()["bias"],
            "qk_bias": mixer.bias == "qk",
            "norm_eps": spec.norm_eps,
            "rope_base": mixer.rope_theta,
            "mean_recurrence": mean,
            "mean_backprop_depth": spec.gradient.model_dump().get("loops") or mean,
            "sampling_scheme": "poisson-lognormal-filling",
            "state_init": "like-init",
            "injection_type": "linear",
        }


def _loops(spec: ImplicitLMSpec) -> int:
    """Return the number of loops of training or of evaluation."""
    depth, exit_ = spec.depth.model_dump(), spec.at_evaluation.exit.model_dump()
    return int(depth.get("mean", exit_.get("loops", 32)))


def _constants(fields: PublishedFields, width: int, heads: int) -> None:
    """Accept fields with the one value that the published code implements, and derived ones."""
    for name, value in {
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "injection_type": "linear",
        "state_init": "like-init",
        "init_strategy": "takase",
        "sampling_scheme": "poisson-lognormal-filling",
    }.items():
        fields.require(name, value, reason=f"the published code implements {value!r} only")
    fields.require("num_key_value_heads", heads, reason="expected n_heads: key heads are not shared")
    fields.require("num_attention_heads", heads, reason="expected n_heads")
    fields.require("hidden_size", width, reason="expected n_embd")
    fields.require("head_dim", width // heads, reason="expected n_embd / n_heads")
    fields.require("test_time_noise", 0, 0.0, reason="noise in the loop is not supported")
    fields.ignore(
        {
            "init_orthogonal": "used for new weights only",
            "n_layers": "the sum of the three numbers of layers",
            "num_hidden_layers": "the sum of the three numbers of layers",
            "effective_expected_depth": "used for new weights only",
            "activation_checkpoint_impl": "recomputes the same values",
            "test_time_noise_type": "without effect where test_time_noise is 0",
        }
    )


def _initial_values(fields: PublishedFields, width: int) -> tuple[float, float]:
    """Return the standard deviation of the embedding and its factor, where they are not derived ones."""
    stored = fields.take("init_values")
    if stored is None:
        stored = {}
    if not isinstance(stored, Mapping):
        fields.complain("init_values", "expected a mapping")
        stored = {}
    inner = PublishedFields(stored, name="init_values")
    inner.ignore(dict.fromkeys(("out_proj", "embedding"), "used for new weights only"))
    std, scale = inner.number("std", sqrt(2 / (5 * width))), inner.number("embed_scale", sqrt(width))
    try:
        inner.check()
    except ValueError as error:
        fields.complaints += [f"init_values: {line.strip()}" for line in str(error).splitlines()[1:]]
    return std, scale


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config.get(name) is not None}


def _rules(names: list[str], heads: Heads, *, tied: bool, bias: bool, qk_bias: bool) -> list[Rule]:
    rules = [
        rename("embedding.weight", "transformer.wte.weight"),
        rename("norm.weight", "transformer.ln_f.weight"),
        rename("injection.proj.weight", "transformer.adapter.weight"),
    ]
    rules += [rename("injection.proj.bias", "transformer.adapter.bias")] if bias else []
    rules += [] if tied else [rename("head.weight", "lm_head.weight")]
    numbers: dict[str, int] = {}
    for name in names:
        layer = numbers.setdefault(name, 0)
        numbers[name] += 1
        ours = f"{'backbone' if name == 'core_block' else name}.layers.{layer}"
        theirs = f"transformer.{name}.{layer}"
        for own, number in (("mixer_norm", 1), ("mixer_post_norm", 2), ("mlp_norm", 3), ("mlp_post_norm", 4)):
            rules.append(rename(f"{ours}.{own}.weight", f"{theirs}.norm_{number}.weight"))
        rules.append(heads.fused(f"{ours}.mixer.in_proj.weight", f"{theirs}.attn.Wqkv.weight"))
        rules.append(rename(f"{ours}.mixer.out_proj.weight", f"{theirs}.attn.proj.weight"))
        if qk_bias:
            rules.append(heads.qk_bias(f"{ours}.mixer.qk_bias", f"{theirs}.attn.qk_bias"))
        halves = [f"{ours}.mlp.gate_proj.weight", f"{ours}.mlp.up_proj.weight"]
        rules.append(split_rows(halves, f"{theirs}.mlp.fc.weight"))
        rules.append(rename(f"{ours}.mlp.out_proj.weight", f"{theirs}.mlp.proj.weight"))
    return rules
