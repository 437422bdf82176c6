"""Configurations and weights of the published implementation of "Implicit Language Models are RNNs".

Its names on the left of the tables, ours on the right. Weight norm is ``weight_g``, ``weight_v`` there and
torch's parametrization here; q, k and v are three matrices there and the rows of one here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.specs import (
    AtEvaluation,
    AttentionSpec,
    ImplicitLMSpec,
    Mamba2Spec,
    PhantomSpec,
    PicardSpec,
    Stopping,
    StoppingOverrides,
    SwiGLUSpec,
)

_LAYER = r"backbone\.layers\.(?P<layer>\d+)\."
_RENAMED = [
    (r"word_emb\.emb\.", "embedding."),
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
_TIED = "criterion.decoder.weight"


def import_spec(config: Mapping[str, Any]) -> ImplicitLMSpec:
    """Return the spec of a published ``config.json``, of type ``implicit_llama3`` or ``implicit_mamba2``.

    Raises:
        ValueError: for another model type, or an explicit backbone.

    """
    backbone, block = config["backbone_config"], config["backbone_config"]["block_cfg"]
    solver, training = config["deq_params"]["solver"], config["deq_params"]["training"]
    if config["backbone_type"] != "implicit":
        raise ValueError(
            f"backbone_type is {config['backbone_type']!r}; only 'implicit' can be imported here"
        )
    d_model = backbone["d_model"]
    family: dict[str, Any]
    match config["model_type"]:
        case "implicit_mamba2":
            widths = {"d_state": block["d_state"], "expand": block["expand"], "head_dim": block["headdim"]}
            family = {"mixer": Mamba2Spec(**widths)}
        case "implicit_llama3":
            hidden = backbone["d_inner"] or 4 * d_model
            family = {
                "mixer": AttentionSpec(n_heads=block["n_head"]),
                "mlp": SwiGLUSpec(d_hidden=int(2 / 3 * hidden)),
            }
        case other:
            raise ValueError(f"model_type is {other!r}; known are implicit_llama3 and implicit_mamba2")
    return ImplicitLMSpec(
        vocab_size=config["vocab_size"],
        pad_vocab_to=config["pad_vocab_size_multiple"] if config["pad_vocab"] else 1,
        d_model=d_model,
        n_layers=backbone["n_layer"],
        dropout=backbone["dropout"],
        tie_embeddings=config["tie_embeddings"],
        solver=PicardSpec(),
        gradient=PhantomSpec(steps=training["grad"], damping=training["tau"]),
        stopping=Stopping(
            tolerance=solver["f_tol"],
            max_iterations=solver["f_max_iter"],
            norm="relative" if solver["f_stop_mode"] == "rel" else "absolute",
        ),
        at_evaluation=AtEvaluation(
            solver=PicardSpec(damping=training["tau"]),
            stopping=StoppingOverrides(max_iterations=solver["eval_f_max_iter"]),
        ),
        **family,
    )


def import_name(name: str) -> str:
    """Return our name of a published parameter; until joined, q, k and v keep theirs (``mixer.wq.…``).

    Raises:
        ValueError: for a name that the published implementation doesn't use.

    """
    for pattern, ours in _RENAMED:
        match = re.match(pattern, name)
        if match:
            stem, leaf = (ours.format(**match.groupdict()) + name[match.end() :]).rsplit(".", 1)
            return f"{stem}.{_NORMED.get(leaf, leaf)}"
    raise ValueError(f"{name!r} is no parameter of the published implementation")


def import_tensors(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and reshape published parameters, or their gradients, to those of ``ImplicitLM``."""
    renamed = {import_name(name): tensor for name, tensor in published.items() if name != _TIED}
    imported = {}
    for name, tensor in renamed.items():
        if ".mixer.conv." in name and tensor.ndim == 3:  # (C, 1, W) there, (C, W) here
            tensor = tensor.squeeze(1)
        if ".mixer.wk." in name or ".mixer.wv." in name:
            continue
        if ".mixer.wq." in name:
            parts = [renamed[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv")]
            name, tensor = name.replace(".wq.", ".in_proj."), torch.cat(parts)
        imported[name] = tensor
    return imported
