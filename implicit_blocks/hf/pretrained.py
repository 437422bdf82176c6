"""Language models of transformers as explicit models, and as initializations of implicit ones.

Llama, Qwen2, Qwen3, Mistral and Mamba2 are read. The explicit model computes the same logits. ``as_start``
converts it to an implicit model whose first iterate equals the explicit model's output: it has the same
weights, starts at the embedding, and its injection is zero. ``implicit_blocks.hf.retrofit`` iterates only the
middle layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.hf.config_fields import ConfigFields
from implicit_blocks.hf.pretrained_tensors import export_tensors, import_tensors
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec

__all__ = ["MODEL_TYPES", "as_start", "export_tensors", "import_spec", "import_tensors"]

MODEL_TYPES = ("llama", "mamba2", "mistral", "qwen2", "qwen3")

# The defaults of transformers for fields that are missing; they differ between the model types.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_LENGTHS = {"mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def import_spec(config: Mapping[str, Any]) -> ExplicitLMSpec:
    """Return the spec of a transformers ``config.json`` of one of the ``MODEL_TYPES``.

    Missing fields have the defaults of transformers.

    Raises:
        ValueError: another model type; or, all listed, missing required fields, values that no spec can
            express, and unknown fields.

    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"unknown model_type {model_type!r}; known: {', '.join(MODEL_TYPES)}. "
            "Choose a model of one of these types"
        )
    fields = ConfigFields(config)
    fields.expect("hidden_act", "silu", "swish", default="silu")
    spec = _mamba2(fields) if model_type == "mamba2" else _transformer(fields, model_type)
    fields.check(model_type)
    return ExplicitLMSpec(**spec)


def _common(fields: ConfigFields) -> dict[str, Any]:
    """Return the spec's fields that every model type has."""
    return {
        "vocab_size": fields.require("vocab_size"),
        "d_model": fields.require("hidden_size"),
        "n_layers": fields.require("num_hidden_layers"),
        "tie_embeddings": fields.get("tie_word_embeddings", False),
    }


def _transformer(fields: ConfigFields, model_type: str) -> dict[str, Any]:
    """Return the spec's fields of Llama, Mistral, Qwen2 or Qwen3."""
    heads, width = fields.require("num_attention_heads"), fields.require("hidden_size")
    head_dim = fields.get("head_dim", 128 if model_type == "qwen3" else None)
    if None not in (head_dim, heads, width) and head_dim * heads == width:
        head_dim = None
    eps = fields.get("rms_norm_eps", 1e-6)
    bias, mlp_bias = _biases(fields, model_type)
    fields.expect("attention_dropout", 0, default=0, remedy="set it to 0; it concerns training only")
    fields.expect("use_mrope", False, default=False)
    fields.expect("rope_interleaved", False, default=False)
    _check_window(fields, model_type)
    mixer = {
        "kind": "attention",
        "n_heads": heads,
        "n_kv_heads": fields.get("num_key_value_heads", _KV_HEADS.get(model_type)),
        "head_dim": head_dim,
        "bias": bias,
        **_rope(fields),
        **({"qk_norm": "weighted", "qk_norm_eps": eps} if model_type == "qwen3" else {}),
    }
    mlp = {"kind": "swiglu", "d_ff": fields.require("intermediate_size"), "bias": mlp_bias}
    std = fields.get("initializer_range", 0.02)
    return _common(fields) | {"norm_eps": eps, "embedding_std": std, "mixer": mixer, "mlp": mlp}


def _biases(fields: ConfigFields, model_type: str) -> tuple[bool | str, bool]:
    """Return the biases of attention and of the MLP."""
    if model_type == "qwen2":
        fields.get("attention_bias", None)  # the class has biases of q, k and v, whatever this field is
        bias: bool | str = "qkv"
    elif model_type == "mistral":
        fields.expect("attention_bias", False, default=False)
        bias = False
    else:
        bias = bool(fields.get("attention_bias", False))
    if model_type == "llama":
        return bias, bool(fields.get("mlp_bias", False))
    fields.expect("mlp_bias", False, default=False)
    return bias, False


def _rope(fields: ConfigFields) -> dict[str, Any]:
    """Return base and scaling of the rotary wavelengths; transformers 5 has other field names than 4."""
    newer, older = fields.get("rope_parameters", None), fields.get("rope_scaling", None)
    place = "rope_parameters" if newer else "rope_scaling"
    rope = {name: value for name, value in (newer or older or {}).items() if value is not None}
    theta = rope.pop("rope_theta", fields.get("rope_theta", None) or 10_000.0)
    oldest = rope.pop("type", "default")
    kind = rope.pop("rope_type", oldest)
    rotated = rope.pop("partial_rotary_factor", fields.get("partial_rotary_factor", None) or 1)
    if rotated != 1:
        fields.complain(f"partial_rotary_factor is {rotated!r}; only 1 (whole heads) is supported")
    if kind not in _SCALINGS:
        reason = " (with dynamic scaling a token depends on later tokens)" if kind == "dynamic" else ""
        fields.complain(f"{place}.rope_type is {kind!r}{reason}; supported: {', '.join(_SCALINGS)}")
        return {}
    names = _SCALINGS[kind]
    if kind != "llama3":  # transformers writes the length beside any scaling
        rope.pop("original_max_position_embeddings", None)
    for name in sorted(rope.keys() - set(names)):
        fields.complain(f"{place}.{name} is {rope[name]!r}, unknown to rope_type {kind!r}; remove it")
    for name in sorted(set(names) - rope.keys()):
        fields.complain(f"{place} has no {name!r}, which rope_type {kind!r} requires")
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **rope} if names else None}


def _check_window(fields: ConfigFields, model_type: str) -> None:
    """Complain about attention to a window of fewer tokens than the model's context."""
    length = fields.get("max_position_embeddings", _LENGTHS.get(model_type, 2048))
    types = fields.get("layer_types", None)
    others = sorted({str(kind) for kind in types or ()} - {"full_attention", "sliding_attention"})
    if others:
        fields.complain(
            f"layer_types has {', '.join(others)}; supported are full_attention, and sliding_attention whose "
            "window is not smaller than the context"
        )
    if model_type == "llama":  # has no window
        fields.expect("sliding_window", default=None)
        return
    window, slides = fields.get("sliding_window", 4096), True
    if model_type != "mistral":
        used, first = fields.get("use_sliding_window", False), fields.get("max_window_layers", 28)
        n_layers = fields.require("num_hidden_layers") or 0
        slides = used and (first < n_layers if types is None else "sliding_attention" in types)
    if slides and window is not None and window < length:
        fields.complain(
            f"sliding_window is {window}, smaller than max_position_embeddings {length}, and attention to a "
            f"window is not supported; for texts of up to {window} tokens, which the window does not change, "
            f"set max_position_embeddings to {window}"
        )


def _mamba2(fields: ConfigFields) -> dict[str, Any]:
    """Return the spec's fields of Mamba2."""
    low, high = fields.get("time_step_limit", (0.0, float("inf")))
    if isinstance(high, Mapping):  # the form in which transformers writes infinity to JSON
        high = high.get("__float__", high)
    if float(low) != 0 or float(high) != float("inf"):
        fields.complain(f"time_step_limit is {[low, high]}; only (0, inf) is supported")
    width, heads, head_dim = (fields.require(name) for name in ("hidden_size", "num_heads", "head_dim"))
    expand = fields.get("expand", 2)
    if None not in (width, heads, head_dim) and width * expand != heads * head_dim:
        fields.complain(
            "hidden_size · expand must equal num_heads · head_dim, "
            f"got {width} · {expand} and {heads} · {head_dim}; correct one of them"
        )
    eps, groups = fields.get("layer_norm_epsilon", 1e-5), fields.get("n_groups", 8)
    fields.expect("rms_norm", True, default=True)
    fields.expect("norm_before_gate", False, default=False)
    # Of initialization, of speed, and of the residual stream's type, which is always float32 here.
    for name in (
        "time_step_rank",
        "time_step_floor",
        "chunk_size",
        "rescale_prenorm_residual",
        "residual_in_fp32",
    ):
        fields.get(name, None)
    mixer = {
        "kind": "mamba2",
        "d_state": fields.get("state_size", 128),
        "expand": expand,
        "head_dim": head_dim,
        "n_groups": groups,
        "norm_groups": None if groups == 1 or _norms_by_group() else 1,
        "d_conv": fields.get("conv_kernel", 4),
        "bias": fields.get("use_bias", False),
        "conv_bias": fields.get("use_conv_bias", True),
        "norm_eps": eps,
        "dt_min": fields.get("time_step_min", 1e-3),
        "dt_max": fields.get("time_step_max", 1e-1),
    }
    std = fields.get("initializer_range", 0.1)
    return _common(fields) | {"norm_eps": eps, "embedding_std": std, "mixer": mixer}


def _norms_by_group() -> bool:
    """Whether the installed transformers normalizes each group separately in Mamba2's gated norm.

    The original Mamba2 does, and so do the newest versions of transformers; older ones normalize the whole
    width (a difference only with several groups). The import follows the installed implementation, since
    its results are compared with it.
    """
    try:
        from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    except ImportError:
        return True
    return "group_size" in MambaRMSNormGated.__init__.__code__.co_varnames


def as_start(
    spec: ExplicitLMSpec, state: Mapping[str, Tensor], *, weight_norm: bool = True
) -> tuple[ImplicitLMSpec, dict[str, Tensor]]:
    """Return an implicit model whose first iterate is the output of the explicit one.

    With weight norm, the gains are the norms of the rows, so that all weights are preserved; a row of zeros
    gets a random direction and gain 0. The injection starts at zero: its gains are 0 (with the directions
    of a new layer), or without weight norm its weights are 0.

    Args:
        spec: spec of the explicit model.
        state: state dict of the explicit model, with tensors of that model's shapes.
        weight_norm: whether the implicit model uses weight norm.

    """
    kept = {name: value for name, value in spec if name in ImplicitLMSpec.model_fields and name != "kind"}
    implicit = ImplicitLMSpec(**{**kept, "weight_norm": weight_norm, "z_init": "embedding"})
    width, d_model = spec.mixer.injection_width(spec.d_model), spec.d_model
    assert width is not None
    like = state["embedding.weight"]
    new: dict[str, Tensor] = {}
    for name, tensor in state.items():
        normed = (
            weight_norm and name.startswith("backbone.") and name.endswith(".weight") and tensor.ndim >= 2
        )
        new |= _normed(name, tensor) if normed else {name: tensor}
    new["injection.norm.weight"] = like.new_ones(d_model)
    new["injection.proj.bias"] = like.new_zeros(width)
    if weight_norm:
        bound = d_model**-0.5
        directions = torch.empty(width, d_model, dtype=torch.float32).uniform_(-bound, bound)
        stem = "injection.proj.parametrizations.weight."
        new[stem + "original0"] = torch.zeros(width, 1)
        new[stem + "original1"] = directions.to(like.dtype)
    else:
        new["injection.proj.weight"] = like.new_zeros(width, d_model)
    return implicit, new


def _normed(name: str, weight: Tensor) -> dict[str, Tensor]:
    wide = weight.float()
    length = torch.linalg.vector_norm(wide.flatten(1), dim=1).view(-1, *[1] * (weight.ndim - 1))
    direction = torch.where(length > 0, wide, torch.ones_like(wide)).to(weight.dtype)
    stem = name.removesuffix("weight") + "parametrizations.weight."
    # The gain is not rounded: that would change the weight.
    return {stem + "original0": length, stem + "original1": direction}
