"""The commands ``convert`` and ``export``: checkpoints of one kind into another, specs into folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from implicit_blocks.hf.checkpoint_files import SAFETENSORS, check_tensors, read_file, whole_folder
from implicit_blocks.hf.folders import (
    Checkpoint,
    copy_tokenizer,
    empty_state,
    fold_weight_norm,
    read_checkpoint,
    special_tokens,
    write_published,
    write_transformers,
)
from implicit_blocks.registry import build
from implicit_blocks.sharded_files import INDEX, read_whole_tensors
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, load_spec

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_TRAINED = "model/"  # what the names of the model's tensors begin with in a checkpoint of the trainer


def convert(
    source: Path,
    destination: Path,
    *,
    to: Literal["transformers", "published"] = "transformers",
    implicit: bool = False,
    fold: bool = False,
    max_shard_size: str = "5GB",
) -> None:
    """Convert a checkpoint; the destination is written whole, or not at all.

    Args:
        source: a folder of the published implementation, of ours, or of a Llama or Mamba2 of transformers.
        destination: a new or empty folder.
        to: a folder for transformers, or for the published implementation.
        implicit: make an explicit model the start of an implicit one.
        fold: fold weight norm into the weights, as merging LoRA with peft needs.
        max_shard_size: size that a file of weights may have, such as ``500MB``.

    Raises:
        ValueError: whatever is wrong with the source, in words; or the destination is not empty.

    """
    size = _bytes(max_shard_size)
    checkpoint = read_checkpoint(source, as_start=implicit)
    if fold:
        checkpoint = fold_weight_norm(checkpoint)
    with whole_folder(destination) as folder:
        if to == "published":
            write_published(checkpoint, folder, max_shard_bytes=size)
        else:
            write_transformers(checkpoint, folder, max_shard_size=max_shard_size)
        copy_tokenizer(source, folder)


def export(
    spec_name: str,
    destination: Path,
    *,
    checkpoint: Path | None = None,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> None:
    """Write a spec's model as a folder of transformers.

    Args:
        spec_name: a name of the zoo, or a YAML file.
        destination: a new or empty folder.
        checkpoint: weights: a file, a folder with ``model.safetensors``, or a checkpoint of the trainer;
            None: fresh ones.
        seed: of fresh weights.
        max_shard_size: size that a file of weights may have.

    Raises:
        ValueError: for a spec without a model that can be exported, weights that do not fit, or a
            destination that is not empty.

    """
    _bytes(max_shard_size)
    spec = getattr(load_spec(spec_name), "model", None)
    if not isinstance(spec, ImplicitLMSpec | ExplicitLMSpec):
        kind = getattr(spec, "kind", None)
        raise ValueError(
            f"{spec_name} has a model of kind {kind!r}; implicit_lm and explicit_lm can be exported"
        )
    if checkpoint is None:
        torch.manual_seed(seed)
        state = build(spec).state_dict()
    else:
        state = _read_weights(checkpoint)
        check_tensors(state, empty_state(spec), what=str(checkpoint))
    length = getattr(getattr(load_spec(spec_name), "data", None), "length", None)
    fields = special_tokens(spec) | ({} if length is None else {"max_position_embeddings": length})
    with whole_folder(destination) as folder:
        write_transformers(Checkpoint(spec, dict(state), fields), folder, max_shard_size=max_shard_size)


def _read_weights(path: Path) -> dict[str, Tensor]:
    if (path / INDEX).is_file():
        tensors = read_whole_tensors(path, prefix=_TRAINED)
        if not tensors:
            raise ValueError(f"{path} has no tensors of a model; give a checkpoint of the trainer")
        return tensors
    file = path / SAFETENSORS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"there are no weights at {file}; give a file, a folder with {SAFETENSORS}, "
            "or a checkpoint of the trainer"
        )
    return read_file(file)


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", size)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size is {size!r}; give a number and KB, MB or GB, such as 500MB")
    return int(match[1]) * _UNITS[match[2]]
