"""Folders of published looped models: ``config.json`` and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from implicit_blocks.checkpoints.find import CONFIG, SAFETENSORS
from implicit_blocks.checkpoints.folder import read_file, read_tensors, write_shards
from implicit_blocks.checkpoints.weights import empty_state
from implicit_blocks.hf.architectures import architecture_for, export_config, find, inner_config
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec

WEIGHTS = "weights.safetensors"
"""The name of the weights beside a configuration with a named architecture."""


class ReadFolder(NamedTuple):
    """What a folder contains: spec, state dict, further fields, configuration and remarks."""

    spec: ImplicitLMSpec
    state: dict[str, Tensor]
    extra: dict[str, Any]
    config: dict[str, Any]
    remarks: tuple[str, ...]


def read_folder(folder: Path, config: Mapping[str, Any]) -> ReadFolder:
    """Read a folder whose configuration ``find`` recognizes.

    Raises:
        ValueError: the configuration has unknown or unsupported fields, or tensors do not fit it; lists all.

    """
    architecture = find(config)
    assert architecture is not None
    published = inner_config(config)
    try:
        reading = architecture.read(published)
        spec = reading.spec
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    tensors = read_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else read_tensors(folder)
    state = reading.tensors.read(tensors, empty_state(spec), what=str(folder))
    return ReadFolder(spec, state, reading.extra, published, reading.remarks)


def is_published(config: Mapping[str, Any] | None, spec: ImplicitLMSpec | ExplicitLMSpec) -> bool:
    """Return whether a model is written in one of these formats: it was read from one, or looks like one."""
    if config is not None:
        return find(config) is not None
    return architecture_for(spec) is not None


def write_folder(
    folder: Path,
    spec: ImplicitLMSpec | ExplicitLMSpec,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any] | None,
    *,
    max_shard_bytes: int,
) -> None:
    """Write configuration and weights in the format of the original configuration, or of the spec.

    Raises:
        ValueError: the format cannot express the spec.

    """
    architecture = architecture_for(spec) if config is None else find(config)
    assert architecture is not None
    exported = export_config(architecture, spec, config)
    (folder / CONFIG).write_text(json.dumps(exported, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = architecture.read(exported).tensors.write(state)
    write_safetensors(folder, tensors, max_shard_bytes=max_shard_bytes)


def write_safetensors(folder: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
    """Write ``model.safetensors``, or shards with an index if it would exceed ``max_shard_bytes``."""
    save = partial(save_file, metadata={"format": "pt"})
    write_shards(folder, tensors, SAFETENSORS, save, max_shard_bytes=max_shard_bytes)
