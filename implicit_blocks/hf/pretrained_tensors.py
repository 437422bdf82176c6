"""Names and shapes of the tensors of transformers' language models, and of ours.

Ours have q, k and v as one matrix, and convolutions of one dimension less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from implicit_blocks.specs import AttentionSpec, ExplicitLMSpec, Mamba2Spec

# Names of transformers and ours; {i} is the number of a layer.
_TRANSFORMER = [
    ("model.embed_tokens.", "embedding."),
    ("lm_head.", "head."),
    ("model.norm.", "backbone.norm."),
    ("model.layers.{i}.input_layernorm.", "backbone.layers.{i}.mixer_norm."),
    ("model.layers.{i}.post_attention_layernorm.", "backbone.layers.{i}.mlp_norm."),
    ("model.layers.{i}.self_attn.o_proj.", "backbone.layers.{i}.mixer.out_proj."),
    ("model.layers.{i}.self_attn.", "backbone.layers.{i}.mixer."),
    ("model.layers.{i}.mlp.down_proj.", "backbone.layers.{i}.mlp.out_proj."),
    ("model.layers.{i}.mlp.", "backbone.layers.{i}.mlp."),
]
_MAMBA2 = [
    ("backbone.embeddings.", "embedding."),
    ("lm_head.", "head."),
    ("backbone.norm_f.", "backbone.norm."),
    ("backbone.layers.{i}.norm.", "backbone.layers.{i}.mixer_norm."),
    ("backbone.layers.{i}.mixer.conv1d.", "backbone.layers.{i}.mixer.conv."),
    ("backbone.layers.{i}.mixer.", "backbone.layers.{i}.mixer."),
]
_OLDER = ("backbone.embedding.", "backbone.embeddings.")
_BUFFER = re.compile(r"rotary_emb\.inv_freq$")  # in older files; not a parameter


def import_tensors(tensors: Mapping[str, Tensor], spec: ExplicitLMSpec) -> dict[str, Tensor]:
    """Rename and fuse the parameters of a causal language model of transformers.

    The shapes are those of our parameters. Unknown names are unchanged, and q, k and v stay separate if one
    of them is missing, so that the caller's check can list them.
    """
    table = [(re.compile(_pattern(theirs)), ours) for theirs, ours in _names(spec)]
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _BUFFER.search(name):
            continue
        name = _rename(name.replace(*_OLDER), table)
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


def export_tensors(state: Mapping[str, Tensor], spec: ExplicitLMSpec) -> dict[str, Tensor]:
    """Return the state dict of an explicit model with the names and shapes of transformers' classes."""
    table = [(re.compile(_pattern(ours)), theirs) for theirs, ours in _names(spec)]
    exported: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if isinstance(spec.mixer, AttentionSpec) and ".mixer.in_proj." in name:
            width, kv_heads = spec.mixer.head_width(spec.d_model), spec.mixer.n_kv_heads or spec.mixer.n_heads
            rows = [spec.mixer.n_heads * width, kv_heads * width, kv_heads * width]
            for part, split in zip("qkv", tensor.split(rows), strict=True):
                exported[_rename(name.replace(".in_proj.", f".{part}_proj."), table)] = split.contiguous()
            continue
        convolution = ".mixer.conv." in name and tensor.ndim == 2
        exported[_rename(name, table)] = tensor.unsqueeze(1) if convolution else tensor
    return exported


def _names(spec: ExplicitLMSpec) -> list[tuple[str, str]]:
    return _MAMBA2 if isinstance(spec.mixer, Mamba2Spec) else _TRANSFORMER


def _pattern(stem: str) -> str:
    return "^" + re.escape(stem).replace(re.escape("{i}"), r"(?P<i>\d+)")


def _rename(name: str, table: Iterable[tuple[re.Pattern[str], str]]) -> str:
    """Replace the stem of a name by that of the first row that matches; other names are unchanged."""
    for pattern, stem in table:
        match = pattern.match(name)
        if match:
            return stem.format(**match.groupdict()) + name[match.end() :]
    return name


def _stack(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors can be concatenated along their first dimension."""
    shapes = [tensor.shape for tensor in tensors]
    return all(len(shape) > 0 and shape[1:] == shapes[0][1:] for shape in shapes)
