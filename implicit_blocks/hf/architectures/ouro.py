"""Ouro (2510.25741): all layers looped a fixed number of times, with a learned gate that says when to stop.

Format of the checkpoints with model type ``ouro`` (modeling_ouro.py beside ByteDance/Ouro-1.4B).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from implicit_blocks.hf.architectures.base import Architecture, Reading
from implicit_blocks.hf.architectures.fields import PublishedFields
from implicit_blocks.hf.architectures.tensor_map import Heads, Rule, TensorMap, rename
from implicit_blocks.specs import AttentionSpec, ImplicitLMSpec, RopeScaling

MODEL_TYPE = "ouro"
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_NORMS = {
    "input_layernorm": "mixer_norm",
    "input_layernorm_2": "mixer_post_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_layernorm_2": "mlp_post_norm",
}


class OuroFormat(Architecture):
    """``z ← RMS(core(z))`` from the embedding, a fixed number of times; nothing is injected."""

    name = "ouro"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Recognize the model type, or the field that only this format has."""
        return config.get("model_type") == MODEL_TYPE or "total_ut_steps" in config

    def read(self, config: Mapping[str, Any]) -> Reading:
        """Return the spec; evaluation takes all loops, or those up to ``early_exit_step``."""
        fields = PublishedFields(config, name="Ouro")
        width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            fields.complain("num_key_value_heads", f"expected a divisor of num_attention_heads {heads}")
        head_dim = fields.integer("head_dim", max(width // heads, 1))
        if head_dim % 2:
            fields.complain("head_dim", "expected an even number: rotary positions rotate pairs")
        layers, loops = fields.layers("num_hidden_layers"), fields.integer("total_ut_steps", 4)
        _constants(fields, layers)
        act = _ACTIVATIONS[fields.choice("hidden_act", "silu", *_ACTIVATIONS)]
        d_ff, vocab = fields.integer("intermediate_size"), fields.integer("vocab_size")
        theta, scaling = _rope(fields)
        tied = fields.flag("tie_word_embeddings", False)
        eps = fields.number("rms_norm_eps", 1e-6)
        std = fields.number("initializer_range", 0.02)
        exit_at, remarks = _exit(fields, loops)
        fields.check()
        mlp: dict[str, Any] = {"kind": "swiglu", "d_ff": d_ff}
        if act != "silu":
            mlp = {"kind": "mlp", "d_ff": d_ff, "activation": act, "gated": True}
        spec = {
            "vocab_size": vocab,
            "d_model": width,
            "n_layers": layers,
            "mixer": {
                "kind": "attention",
                "n_heads": heads,
                "n_kv_heads": None if kv_heads == heads else kv_heads,
                "head_dim": None if head_dim * heads == width else head_dim,
                "rope_theta": theta,
                "rope_scaling": scaling,
            },
            "mlp": mlp,
            "norm_eps": eps,
            "tie_embeddings": tied,
            "embedding_std": std,
            "weight_norm": False,
            "norm_placement": "sandwich",
            "core_norm": True,
            "injection": {"kind": "none"},
            "z_init": {"kind": "embedding"},
            "depth": {"kind": "fixed", "loops": loops},
            "gradient": {"kind": "last_loops", "loops": None},
            "objective": {"kind": "exit_mixture"},
            "exit_gate": True,
            "state_policy": "per_loop",
            "at_evaluation": {
                "exit": {"kind": "fixed", "loops": exit_at},
                "solver": {"kind": "picard", "damping": 1.0},
            },
        }
        sizes = Heads(heads, kv_heads, head_dim, adjacent_pairs=False)
        copies = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        return Reading(
            spec, TensorMap(tuple(_rules(layers, sizes, tied=tied)), copies), remarks, _tokens(config)
        )

    def describes(self, spec: ImplicitLMSpec) -> bool:
        """Return whether there is an exit gate and no injection."""
        return spec.injection.kind == "none" and spec.exit_gate

    def write(self, spec: ImplicitLMSpec) -> dict[str, Any]:
        """Return the configuration."""
        mixer, mlp = spec.mixer, spec.mlp
        if (
            not isinstance(mixer, AttentionSpec)
            or mlp is None
            or not mlp.model_dump().get("gated", mlp.kind == "swiglu")
        ):
            raise ValueError("the format has attention and gated MLPs only")
        names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
        hidden, depth, exit_ = mlp.model_dump(), spec.depth.model_dump(), spec.at_evaluation.exit.model_dump()
        config: dict[str, Any] = {
            "model_type": MODEL_TYPE,
            "architectures": ["OuroForCausalLM"],
            "hidden_size": spec.d_model,
            "intermediate_size": hidden["d_ff"],
            "num_hidden_layers": spec.n_layers,
            "num_attention_heads": mixer.n_heads,
            "num_key_value_heads": mixer.n_kv_heads or mixer.n_heads,
            "head_dim": mixer.head_width(spec.d_model),
            "hidden_act": names[hidden.get("activation", "silu")],
            "vocab_size": spec.padded_vocab_size,
            "rms_norm_eps": spec.norm_eps,
            "rope_theta": mixer.rope_theta,
            "rope_scaling": None if mixer.rope_scaling is None else mixer.rope_scaling.model_dump(),
            "tie_word_embeddings": spec.tie_embeddings,
            "total_ut_steps": depth.get("loops") or exit_.get("loops", 4),
            "layer_types": ["full_attention"] * spec.n_layers,
            "max_position_embeddings": 65536,
            "attention_dropout": 0.0,
        }
        return config | ({"early_exit_threshold": exit_["threshold"]} if exit_["kind"] == "gate" else {})


def _constants(fields: PublishedFields, layers: int) -> None:
    fields.require("attention_dropout", 0.0, 0, None, reason="dropout of attention weights is not supported")
    fields.require("attention_bias", False, None, reason="the published code has no biases")
    fields.require("mlp_bias", False, None, reason="the published code has no biases")
    kinds = fields.take("layer_types")
    full = (
        isinstance(kinds, list)
        and len(kinds) >= layers
        and set(map(str, kinds[:layers])) == {"full_attention"}
    )
    if kinds is not None and not full:
        fields.complain(
            "layer_types", f"expected {layers} times 'full_attention'; sliding windows are not supported"
        )
    unused = "without effect where all layers are of type full_attention"
    fields.ignore(dict.fromkeys(("sliding_window", "use_sliding_window", "max_window_layers"), unused))
    fields.ignore({"chunk_size": "read by the published code and not used"})
    fields.ignore({"max_position_embeddings": "the rotations are computed for any position"})


def _rope(fields: PublishedFields) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling, from the field names of transformers 5 or of earlier versions."""
    theta, scaling = fields.number("rope_theta", 10_000.0), fields.take("rope_scaling")
    scaling_fields = fields.take("rope_parameters", scaling)
    if scaling_fields is None:
        return theta, None
    if not isinstance(scaling_fields, Mapping):
        fields.complain("rope_scaling", "expected a mapping")
        return theta, None
    inner = PublishedFields(scaling_fields, name="rope_scaling")
    theta = inner.number("rope_theta", theta)
    kind = inner.take("type", inner.take("rope_type", "default"))
    known = {name: inner.take(name) for name in RopeScaling.model_fields if name in scaling_fields}
    if kind not in ("default", "linear", "llama3"):
        inner.complaints.append(f"type is {kind!r}: supported are 'default', 'linear' and 'llama3'")
    try:
        inner.check()
    except ValueError as error:
        fields.complaints += [f"rope_scaling: {line.strip()}" for line in str(error).splitlines()[1:]]
        return theta, None
    return theta, None if kind == "default" else {**known, "rope_type": kind}


def _exit(fields: PublishedFields, loops: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of loops in evaluation, and remarks; a fixed step takes precedence.

    The published code takes all loops also with a threshold, and then chooses a loop for each token.
    """
    step = fields.take("early_exit_step")
    if step is not None and (type(step) is not int or not 0 <= step < loops):
        fields.complain("early_exit_step", f"expected a number from 0 to {loops - 1}")
        step = None
    threshold = fields.optional_number("early_exit_threshold")
    if step is not None:
        return step + 1, ()
    if threshold is None or threshold >= 1:
        return loops, ()
    remark = (
        f"early_exit_threshold {threshold:g} is not part of the spec, which takes all loops with one state "
        "per loop, as published decoding does; to exit by the gate, set state_policy: converged and "
        f"at_evaluation.exit: {{kind: gate, threshold: {threshold:g}}}"
    )
    return loops, (remark,)


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    return {name: config[name] for name in names if config.get(name) is not None}


def _rules(layers: int, heads: Heads, *, tied: bool) -> list[Rule]:
    rules = [
        rename("embedding.weight", "model.embed_tokens.weight"),
        rename("backbone.norm.weight", "model.norm.weight"),
        rename("exit_gate.weight", "model.early_exit_gate.weight"),
        rename("exit_gate.bias", "model.early_exit_gate.bias"),
    ]
    rules += [] if tied else [rename("head.weight", "lm_head.weight")]
    for layer in range(layers):
        ours, theirs = f"backbone.layers.{layer}", f"model.layers.{layer}"
        rules += [rename(f"{ours}.{own}.weight", f"{theirs}.{name}.weight") for name, own in _NORMS.items()]
        parts = [f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"]
        rules.append(heads.joined(f"{ours}.mixer.in_proj.weight", parts))
        rules.append(rename(f"{ours}.mixer.out_proj.weight", f"{theirs}.self_attn.o_proj.weight"))
        for part, name in (("gate_proj", "gate_proj"), ("up_proj", "up_proj"), ("out_proj", "down_proj")):
            rules.append(rename(f"{ours}.mlp.{part}.weight", f"{theirs}.mlp.{name}.weight"))
    return rules
