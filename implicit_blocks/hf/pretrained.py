"""transformers' ``LlamaForCausalLM`` and ``Mamba2ForCausalLM`` as explicit models and as initializations.

The explicit twin computes the same logits. ``as_start`` converts it to an implicit model whose first iterate
equals the explicit model's output: it has the same weights, starts at the embedding, and its injection is
zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.specs import (
    AttentionSpec,
    ExplicitLMSpec,
    ImplicitLMSpec,
    Mamba2Spec,
    RopeScaling,
    SwiGLUSpec,
)

MODEL_TYPES = ("llama", "mamba2")


def import_spec(config: Mapping[str, Any]) -> ExplicitLMSpec:
    """Return the spec of a transformers ``config.json`` of model type ``llama`` or ``mamba2``.

    Missing fields have the defaults of transformers.

    Raises:
        ValueError: another model type, missing required fields, or values that no spec can express.

    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"unknown model_type {model_type!r}; known: {', '.join(MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}; only 'silu' is supported")
    try:
        return _llama(config) if model_type == "llama" else _mamba2(config)
    except KeyError as error:
        raise ValueError(f"the configuration of this {model_type} model has no {error.args[0]!r}") from None


def _llama(config: Mapping[str, Any]) -> ExplicitLMSpec:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = _rope_parameters(config)
    head_dim = config.get("head_dim")
    return ExplicitLMSpec(
        vocab_size=config["vocab_size"],
        d_model=width,
        n_layers=config["num_hidden_layers"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_std=config.get("initializer_range", 0.02),
        mixer=AttentionSpec(
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads"),
            head_dim=None if head_dim is None or head_dim * heads == width else head_dim,
            bias=config.get("attention_bias", False),
            rope_theta=rope.pop("rope_theta", 10_000.0),
            rope_scaling=_rope_scaling(rope),
        ),
        mlp=SwiGLUSpec(d_ff=config["intermediate_size"], bias=config.get("mlp_bias", False)),
    )


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return base and scaling as one mapping, from the field names of transformers 5 or earlier."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" in config:
        parameters.setdefault("rope_theta", config["rope_theta"])
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type", "default"))
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor must be 1; partially rotated heads are not supported")
    return parameters


def _rope_scaling(parameters: dict[str, Any]) -> RopeScaling | None:
    kind = parameters["rope_type"]
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        reason = " (with dynamic scaling a token depends on later tokens)" if kind == "dynamic" else ""
        raise ValueError(f"rope_type is {kind!r}{reason}; supported: default, linear, llama3")
    known = {name: value for name, value in parameters.items() if name in RopeScaling.model_fields}
    return RopeScaling(**known)


def _mamba2(config: Mapping[str, Any]) -> ExplicitLMSpec:
    low, high = config.get("time_step_limit", (0.0, float("inf")))
    if isinstance(high, Mapping):  # the form in which transformers writes infinity to JSON
        high = high.get("__float__", high)
    if float(low) != 0 or float(high) != float("inf"):
        raise ValueError(f"time_step_limit is {[low, high]}; only (0, inf) is supported")
    if config["hidden_size"] * config.get("expand", 2) != config["num_heads"] * config["head_dim"]:
        raise ValueError("hidden_size · expand must equal num_heads · head_dim")
    eps, groups = config.get("layer_norm_epsilon", 1e-5), config.get("n_groups", 8)
    return ExplicitLMSpec(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        norm_eps=eps,
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_std=config.get("initializer_range", 0.1),
        mixer=Mamba2Spec(
            d_state=config.get("state_size", 128),
            expand=config.get("expand", 2),
            head_dim=config["head_dim"],
            n_groups=groups,
            norm_groups=None if groups == 1 or _norms_by_group() else 1,
            d_conv=config.get("conv_kernel", 4),
            bias=config.get("use_bias", False),
            conv_bias=config.get("use_conv_bias", True),
            norm_eps=eps,
            dt_min=config.get("time_step_min", 1e-3),
            dt_max=config.get("time_step_max", 1e-1),
        ),
    )


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


# ------------------------------------------------------------------------------------ tensors

_LLAMA = [
    (r"model\.embed_tokens\.", "embedding."),
    (r"lm_head\.", "head."),
    (r"model\.norm\.", "backbone.norm."),
    (r"model\.layers\.(\d+)\.input_layernorm\.", r"backbone.layers.\1.mixer_norm."),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.", r"backbone.layers.\1.mlp_norm."),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.", r"backbone.layers.\1.mixer.out_proj."),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"backbone.layers.\1.mixer.\2_proj."),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj\.", r"backbone.layers.\1.mlp.\2_proj."),
    (r"model\.layers\.(\d+)\.mlp\.down_proj\.", r"backbone.layers.\1.mlp.out_proj."),
]
_MAMBA2 = [
    (r"backbone\.embeddings?\.", "embedding."),
    (r"lm_head\.", "head."),
    (r"backbone\.norm_f\.", "backbone.norm."),
    (r"backbone\.layers\.(\d+)\.norm\.", r"backbone.layers.\1.mixer_norm."),
    (r"backbone\.layers\.(\d+)\.mixer\.conv1d\.", r"backbone.layers.\1.mixer.conv."),
    (r"backbone\.layers\.(\d+)\.mixer\.", r"backbone.layers.\1.mixer."),
]
_BUFFER = re.compile(r"rotary_emb\.inv_freq$")  # in older files; not a parameter


def import_tensors(given: Mapping[str, Tensor], spec: ExplicitLMSpec) -> dict[str, Tensor]:
    """Rename and fuse the parameters of a ``LlamaForCausalLM`` or ``Mamba2ForCausalLM``.

    Unknown names are unchanged, and q, k and v stay separate if one of them is missing, so that the caller's
    check can list them.
    """
    table = _MAMBA2 if isinstance(spec.mixer, Mamba2Spec) else _LLAMA
    renamed: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if _BUFFER.search(name):
            continue
        for pattern, ours in table:
            new, changed = re.subn("^" + pattern, ours, name)
            if changed:
                name = new
                break
        if ".mixer.conv." in name and tensor.ndim == 3:
            tensor = tensor.squeeze(1)
        renamed[name] = tensor
    if spec.tie_embeddings:
        renamed.pop("head.weight", None)
    for name in [name for name in renamed if ".mixer.q_proj." in name]:
        parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
        if all(part in renamed for part in parts) and _stack(renamed[part] for part in parts):
            renamed[name.replace(".q_proj.", ".in_proj.")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


def _stack(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors can be concatenated along their first dimension."""
    shapes = [tensor.shape for tensor in tensors]
    return all(len(shape) > 0 and shape[1:] == shapes[0][1:] for shape in shapes)


def as_start(
    spec: ExplicitLMSpec, state: Mapping[str, Tensor], *, weight_norm: bool = True
) -> tuple[ImplicitLMSpec, dict[str, Tensor]]:
    """Return an implicit model whose first iterate is the output of the explicit one.

    With weight norm, the gains are the norms of the rows, so that all weights are preserved; a row of zeros
    gets a random direction and gain 0. The injection starts at zero: its gains are 0 (with the directions
    of a new layer), or without weight norm its weights are 0.

    Args:
        spec: spec of the explicit model.
        state: state dict of the explicit model.
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
