"""Conversion of configurations and weights of the published "Implicit Language Models are RNNs".

The tables map published names (left) to ours (right). The published files store weight norm as
``weight_g`` and ``weight_v``, we as torch's parametrization; q, k and v are three matrices there and one
fused matrix here; the weight of a convolution has one more dimension there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.specs import (
    AndersonSpec,
    AtEvaluation,
    AttentionSpec,
    ExplicitLMSpec,
    GradientSpec,
    ImplicitFunctionSpec,
    ImplicitLMSpec,
    Mamba2Spec,
    PhantomSpec,
    PicardSpec,
    SolverSpec,
    Stopping,
    StoppingOverrides,
    SwiGLUSpec,
)

MODEL_TYPES = ("implicit_llama3", "implicit_mamba2")

_NORM_MODES = {"rel": "relative", "abs": "absolute"}
_BLOCK_FIELDS = {
    "implicit_mamba2": {
        "d_state": "d_state",
        "expand": "expand",
        "headdim": "head_dim",
        "ngroups": "n_groups",
        "d_conv": "d_conv",
        "chunk_size": "chunk_size",
        "dt_min": "dt_min",
        "dt_max": "dt_max",
        "bias": "bias",
        "conv_bias": "conv_bias",
    },
    "implicit_llama3": {"n_head": "n_heads", "rope_theta": "rope_theta", "bias": "bias"},
}

# ------------------------------------------------------------------------------------ reading configurations


def import_spec(config: Mapping[str, Any]) -> ImplicitLMSpec | ExplicitLMSpec:
    """Return the spec of a published ``config.json``, model type ``implicit_llama3`` or ``implicit_mamba2``.

    Training options (pretraining steps, Jacobian regularization, weight decay) are not part of a model spec
    and are ignored.

    Raises:
        ValueError: another model type, missing fields, or values that no spec can express.

    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"unknown model_type {model_type!r}; known: {', '.join(MODEL_TYPES)}")
    try:
        backbone = config["backbone_config"]
        _refuse_unknown_choices(config)
        explicit = "explicit" in config["backbone_type"]
        fields = _common_fields(config, backbone)
        if explicit:
            return ExplicitLMSpec(**fields)
        return ImplicitLMSpec(**fields, **_search_fields(config["deq_params"], backbone))
    except KeyError as error:
        raise ValueError(f"the configuration of this {model_type} model has no {error.args[0]!r}") from None


def _refuse_unknown_choices(config: Mapping[str, Any]) -> None:
    backbone = config["backbone_config"]
    block = backbone["block_cfg"]
    block_type = "mamba2" if config["model_type"] == "implicit_mamba2" else "transformer"
    complaints = [
        f"{name} is {value!r}; only {wanted!r} is supported"
        for name, value, wanted in (
            ("block_type", backbone.get("block_type", block_type), block_type),
            ("pre_norm", backbone.get("pre_norm", True), True),
            ("rms_norm", backbone.get("rms_norm", True), True),
            ("norm_epsilon", backbone.get("norm_epsilon", 1e-5), 1e-5),  # fixed in the injection's norm
            ("head_bias", config.get("head_bias", False), False),
            ("d_embed", config.get("d_embed") or backbone["d_model"], backbone["d_model"]),
            (
                "mlp_type",
                backbone.get("mlp_type", "llama_mlp") if backbone["d_inner"] else "llama_mlp",
                "llama_mlp",
            ),
        )
        if value != wanted
    ]
    unknown = sorted(block.keys() - _BLOCK_FIELDS[config["model_type"]].keys())
    complaints += [f"block_cfg has {name} = {block[name]!r}, which no spec can express" for name in unknown]
    if complaints:
        raise ValueError("; ".join(complaints))


def _common_fields(config: Mapping[str, Any], backbone: Mapping[str, Any]) -> dict[str, Any]:
    names = _BLOCK_FIELDS[config["model_type"]]
    block = {names[name]: value for name, value in backbone["block_cfg"].items()}
    mamba = config["model_type"] == "implicit_mamba2"
    # The published Mamba2 reads n_tokens, Llama reads vocab_size.
    counts = ("n_tokens", "vocab_size") if mamba else ("vocab_size", "n_tokens")
    hidden = backbone["d_inner"]
    return {
        "vocab_size": next(config[name] for name in (*counts, counts[0]) if name in config),
        "pad_vocab_to": config["pad_vocab_size_multiple"] if config.get("pad_vocab", False) else 1,
        "d_model": backbone["d_model"],
        "n_layers": backbone["n_layer"],
        "mixer": Mamba2Spec(**block) if mamba else AttentionSpec(**block),
        "mlp": SwiGLUSpec(d_ff=int(2 * hidden / 3)) if hidden else None,
        "dropout": backbone.get("dropout", 0.0),
        "tie_embeddings": config.get("tie_embeddings", True),
    }


def _search_fields(deq: Mapping[str, Any], backbone: Mapping[str, Any]) -> dict[str, Any]:
    solver, training = deq["solver"], deq["training"]
    # The published evaluation uses the cap if given, else a multiple of training's iterations.
    cap = solver["eval_f_max_iter"] or int(solver["f_max_iter"] * solver["eval_factor"])
    gradient: GradientSpec = PhantomSpec(steps=training["grad"], damping=training["tau"])
    if training.get("ift") or training.get("hook_ift"):
        backward = Stopping(
            tolerance=solver["b_tol"],
            max_iterations=solver["b_max_iter"],
            norm=_norm_mode(solver["b_stop_mode"]),
        )
        gradient = ImplicitFunctionSpec(solver=_solver(solver["b_solver"]), stopping=backward)
    return {
        "weight_norm": backbone.get("do_weight_norm", True),
        "z_init": "embedding" if backbone.get("init_z_mode") == "input" else "zeros",
        "solver": _solver(solver["f_solver"]),
        "gradient": gradient,
        "stopping": Stopping(
            tolerance=solver["f_tol"],
            max_iterations=solver["f_max_iter"],
            norm=_norm_mode(solver["f_stop_mode"]),
        ),
        "at_evaluation": AtEvaluation(
            solver=PicardSpec(damping=training["tau"]), stopping=StoppingOverrides(max_iterations=cap)
        ),
    }


def _solver(name: str) -> SolverSpec:
    if name == "fixed_point_iter":
        return PicardSpec()
    if name == "anderson":
        return AndersonSpec()
    raise ValueError(f"unknown solver {name!r}; known: fixed_point_iter, anderson")


def _norm_mode(name: str) -> Any:
    if name not in _NORM_MODES:
        raise ValueError(f"unknown stopping mode {name!r}; known: rel, abs")
    return _NORM_MODES[name]


# ------------------------------------------------------------------------------------ writing configurations


def export_config(
    spec: ImplicitLMSpec | ExplicitLMSpec, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the published ``config.json`` of a spec.

    Args:
        spec: the spec to export.
        original: the published configuration that the model was imported from; it is returned unchanged if
            it still describes the spec, so that a round trip changes nothing.

    Raises:
        ValueError: the published implementation cannot express the spec.

    """
    if original is not None and import_spec(original) == spec:
        return copy.deepcopy(dict(original))
    mixer, implicit = spec.mixer, isinstance(spec, ImplicitLMSpec)
    mamba = isinstance(mixer, Mamba2Spec)
    model_type = MODEL_TYPES[mamba]
    block = {theirs: getattr(mixer, ours, None) for theirs, ours in _BLOCK_FIELDS[model_type].items()}
    hidden = 0 if spec.mlp is None else _their_hidden(getattr(spec.mlp, "d_ff", 0))
    backbone = {
        "block_cfg": block,
        "block_type": "mamba2" if mamba else "transformer",
        "d_inner": hidden,
        "d_model": spec.d_model,
        "dropout": spec.dropout,
        "n_layer": spec.n_layers,
        "pre_norm": True,
        "rms_norm": True,
    }
    backbone |= {} if mamba else {"mlp_type": "llama_mlp"}
    config = {
        "architectures": ["ImplicitMambaForCausalLM" if mamba else "ImplicitLlamaForCausalLM"],
        "backbone_config": backbone,
        "backbone_type": "implicit" if implicit else "explicit",
        "d_embed": spec.d_model,
        "deq_params": {},
        "dropout": 0.0,
        "head_bias": False,
        "model_type": model_type,
        "pad_vocab": spec.pad_vocab_to > 1,
        "pad_vocab_size_multiple": spec.pad_vocab_to if spec.pad_vocab_to > 1 else 8,
        "tie_embeddings": spec.tie_embeddings,
        "vocab_size": spec.vocab_size,
    }
    config |= {"n_tokens": spec.vocab_size} if mamba else {}
    if isinstance(spec, ImplicitLMSpec):
        backbone |= {"init_gain": 0.5, "pretrain_iter": 4, "pretrain_steps": 0}
        backbone |= {} if spec.weight_norm else {"do_weight_norm": False}
        backbone |= {} if spec.start.kind == "zeros" else {"init_z_mode": "input"}
        config["deq_params"] = _deq_params(spec)
    try:
        again: Any = import_spec(config)
    except ValueError as error:
        raise ValueError(f"the published implementation cannot express this spec: {error}") from None
    ours, theirs = spec.model_dump(), again.model_dump()
    if isinstance(spec, ImplicitLMSpec):
        ours["z_init"], theirs["z_init"] = spec.start.model_dump(), again.start.model_dump()
    lost = [name for name, value in ours.items() if name not in _BESIDE and theirs[name] != value]
    if isinstance(spec, ImplicitLMSpec) and (
        again.evaluation_stopping != spec.evaluation_stopping
        or again.at_evaluation.solver != spec.at_evaluation.solver
    ):
        lost.append("at_evaluation")
    if lost:
        raise ValueError(
            "the published implementation cannot express these fields of the spec: "
            f"{', '.join(f'{name} ({ours[name]!r})' for name in lost)}"
        )
    return config


_BESIDE = ("embedding_std", "scale_residual_init", "at_evaluation")  # of initialization; compared separately


def _their_hidden(hidden: int) -> int:
    """Return the number whose two thirds are the hidden width."""
    theirs = -(-3 * hidden // 2)
    assert int(2 * theirs / 3) == hidden
    return theirs


def _deq_params(spec: ImplicitLMSpec) -> dict[str, Any]:
    modes = {ours: theirs for theirs, ours in _NORM_MODES.items()}
    gradient, evaluation = spec.gradient, spec.at_evaluation.solver
    tau = gradient.damping if isinstance(gradient, PhantomSpec) else getattr(evaluation, "damping", 1.0)
    backward = gradient.stopping if isinstance(gradient, ImplicitFunctionSpec) else Stopping(tolerance=1e-3)
    back_solver = gradient.solver if isinstance(gradient, ImplicitFunctionSpec) else PicardSpec()
    names = {"picard": "fixed_point_iter", "anderson": "anderson"}
    return {
        "norm": {
            "norm_clip": False,
            "norm_clip_val": 1.0,
            "norm_no_scale": False,
            "norm_target_norm": 1.0,
            "norm_type": "weight_norm",
            "sn_n_power_iters": 1,
        },
        "regularization": {
            "jac_incremental": 0,
            "jac_loss_freq": 0.0,
            "jac_loss_weight": 0.0,
            "sradius_mode": True,
        },
        "solver": {
            "b_max_iter": backward.max_iterations,
            "b_solver": names.get(back_solver.kind, back_solver.kind),
            "b_stop_mode": modes[backward.norm],
            "b_tol": backward.tolerance,
            "eval_f_max_iter": spec.evaluation_stopping.max_iterations,
            "eval_factor": 4.0,
            "f_max_iter": spec.stopping.max_iterations,
            "f_solver": names.get(spec.solver.kind, spec.solver.kind),
            "f_stop_mode": modes[spec.stopping.norm],
            "f_tol": spec.stopping.tolerance,
        },
        "training": {
            "core": "sliced",
            "gamma": 0.8,
            "grad": getattr(gradient, "steps", 1),
            "hook_ift": False,
            "ift": isinstance(gradient, ImplicitFunctionSpec),
            "indexing": [],
            "n_states": 1,
            "sup_gap": -1,
            "sup_loc": [],
            "tau": tau,
        },
    }


# ------------------------------------------------------------------------------------ tensors

_LAYER = r"backbone\.layers\.(?P<layer>\d+)\."
_RENAMED = [
    (r"word_emb\.emb\.", "embedding."),
    (r"criterion\.decoder\.", "head."),
    (r"backbone\.injection_norm\.", "injection.norm."),
    (r"backbone\.injection\.", "injection.proj."),
    (r"backbone\.norm_f\.", "backbone.norm."),
    (_LAYER + r"norm\.", "backbone.layers.{layer}.mixer_norm."),
    (_LAYER + r"norm2\.", "backbone.layers.{layer}.mlp_norm."),
    (_LAYER + r"mlp\.w1\.", "backbone.layers.{layer}.mlp.gate_proj."),
    (_LAYER + r"mlp\.w3\.", "backbone.layers.{layer}.mlp.up_proj."),
    (_LAYER + r"mlp\.fc2\.", "backbone.layers.{layer}.mlp.out_proj."),
    (_LAYER + r"mixer\.conv1d\.", "backbone.layers.{layer}.mixer.conv."),
    (_LAYER + r"mixer\.", "backbone.layers.{layer}.mixer."),
]
_NORMED = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
_EMBEDDING, _HEAD = "word_emb.emb.weight", "criterion.decoder.weight"


def import_name(name: str) -> str:
    """Return our name of a published parameter; q, k and v keep theirs (``mixer.wq.…``) until they are fused.

    Raises:
        ValueError: the published implementation does not use the name.

    """
    for pattern, ours in _RENAMED:
        match = re.match(pattern, name)
        if match:
            stem, leaf = (ours.format(**match.groupdict()) + name[match.end() :]).rsplit(".", 1)
            return f"{stem}.{_NORMED.get(leaf, leaf)}"
    raise ValueError(f"{name!r} is not a parameter of the published implementation")


def import_tensors(published: Mapping[str, Tensor], *, tied: bool = True) -> dict[str, Tensor]:
    """Rename and reshape published parameters, or their gradients, to those of our state dicts."""
    skipped = {_HEAD} if tied else set()
    renamed = {import_name(name): tensor for name, tensor in published.items() if name not in skipped}
    imported = {}
    for name, tensor in renamed.items():
        if ".mixer.conv." in name and tensor.ndim == 3:  # published as (C, 1, W), ours is (C, W)
            tensor = tensor.squeeze(1)
        if ".mixer.wk." in name or ".mixer.wv." in name:
            continue
        if ".mixer.wq." in name:
            parts = [renamed[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv")]
            name, tensor = name.replace(".wq.", ".in_proj."), torch.cat(parts)
        imported[name] = tensor
    return imported


def export_tensors(state: Mapping[str, Tensor], spec: ImplicitLMSpec | ExplicitLMSpec) -> dict[str, Tensor]:
    """Rename and reshape our state dict to the published one, with the tied head; accepts meta tensors."""
    exported = {}
    for name, tensor in state.items():
        theirs = _export_name(name)
        if ".mixer.conv." in name and tensor.ndim == 2:
            tensor = tensor.unsqueeze(1)
        if not isinstance(spec.mixer, Mamba2Spec) and ".mixer.in_proj." in name:
            for part, rows in zip(("wq", "wk", "wv"), tensor.chunk(3), strict=True):
                exported[theirs.replace(".in_proj.", f".{part}.")] = rows
            continue
        exported[theirs] = tensor
    if spec.tie_embeddings:
        exported[_HEAD] = exported[_EMBEDDING]
    return exported


def _export_name(name: str) -> str:
    for theirs, ours in _NORMED.items():
        name = name.replace(ours, theirs)
    for pattern, ours in _RENAMED:
        escaped = re.escape(ours).replace(r"\{layer\}", r"(?P<layer>\d+)")
        match = re.match(escaped, name)
        if match:
            stem = pattern.replace(_LAYER, f"backbone.layers.{match.groupdict().get('layer')}.")
            return stem.replace("\\", "") + name[match.end() :]
    raise ValueError(f"{name!r} has no counterpart in the published implementation")
