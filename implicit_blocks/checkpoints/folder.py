"""Reading the tensors of a folder, and writing folders atomically.

Reads the files of transformers and of the published implementation: ``model.safetensors`` or
``pytorch_model.bin``, as one file or as shards with an index. Pickles are read as weights only: no code in
them is executed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from implicit_blocks.checkpoints.find import CONFIG, SAFETENSORS, plain_name, read_json

PICKLE = "pytorch_model.bin"


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ValueError: the folder does not exist or has no readable configuration.

    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory; give one with {CONFIG} and weights")
    if not path.is_file():
        raise ValueError(f"{folder} is not a pretrained folder: {CONFIG} is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} contains a {type(config).__name__}; expected a mapping")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder from the known files that exist.

    Raises:
        ValueError: the folder has no weights; a shard is missing, truncated or lacks tensors of the index;
            or a pickle contains more than weights.

    """
    for name in (SAFETENSORS, PICKLE):
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(index)
        if (folder / name).is_file():
            return read_file(folder / name)
    raise ValueError(f"{folder} has no weights; expected {SAFETENSORS}, {PICKLE}, or shards with an index")


def read_file(path: Path) -> dict[str, Tensor]:
    """Read one file of tensors, without unnecessary copies.

    Raises:
        ValueError: the file is truncated, contains more than weights, or is not a file of tensors.

    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} contains more than weights and is not read, because unpickling can execute code: "
            f"{reason}"
        ) from None
    except Exception as error:  # the reader of a crafted file can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} cannot be read; it is truncated or not a torch file: {reason}") from None
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise ValueError(f"{path} is not a state dict: expected a mapping of names to tensors")
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(f"{path}: {name} is sparse, quantized or has no data; save it as a dense tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name} has too few bytes for its shape {tuple(tensor.shape)}")
    return dict(found)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # the reader of a crafted header can raise anything
        raise ValueError(
            f"{path} cannot be read; it is truncated or not a safetensors file: {error}"
        ) from None
    try:
        aliases = json.loads(metadata.get("aliases", "{}"))
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(
        isinstance(name, str) and name in tensors and alias not in tensors for alias, name in aliases.items()
    ):
        raise ValueError(
            f"{path}: the aliases in the header are not a JSON object that maps new names to tensors; "
            "save the file again, or remove the aliases"
        )
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}  # shared tensors


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        names = list(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not an index: expected a JSON mapping with a weight_map") from None
    for name in names:
        if not isinstance(name, str) or not plain_name(name):
            raise ValueError(
                f"{index}: the weight_map names {name!r}, which is not a file of {index.parent}; "
                "put all shards into one folder"
            )
    files = sorted(set(names))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(files)} shards are missing in {index.parent}: {', '.join(missing)}"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        shard = read_file(index.parent / file)
        if twice := sorted(found.keys() & shard.keys()):
            raise ValueError(f"{twice[0]} is stored in several shards of {index.parent}, including {file}")
        found |= shard
    lost = sorted(weight_map.keys() - found.keys())
    if lost:
        raise ValueError(f"the shards of {index.parent} lack tensors of the index: {', '.join(lost)}")
    return found


_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


COUNTERS = frozenset({"depth.draws"})
"""Tensors that count the steps of a run: present only if the depth is random, and no part of the weights."""


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, what: str) -> None:
    """Compare names, shapes and types; weights may have any type used for training or storage.

    ``COUNTERS`` may be missing, or be given without being expected.

    Raises:
        ValueError: lists all tensors that are missing, unknown, or of another shape or type.

    """
    complaints = [
        f"{name} is missing, {tuple(expected[name].shape)}"
        for name in expected.keys() - tensors.keys() - COUNTERS
    ]
    complaints += [
        f"{name} is unknown, {tuple(tensors[name].shape)}"
        for name in tensors.keys() - expected.keys() - COUNTERS
    ]
    complaints += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in tensors.keys() & expected.keys()
        if tensors[name].shape != expected[name].shape
    ]
    complaints += [
        f"{name} has type {_type(tensors[name].dtype)}, expected "
        + (
            " or ".join(map(_type, _WEIGHTS))
            if expected[name].dtype in _WEIGHTS
            else _type(expected[name].dtype)
        )
        for name in tensors.keys() & expected.keys()
        if tensors[name].dtype != expected[name].dtype
        and not (tensors[name].dtype in _WEIGHTS and expected[name].dtype in _WEIGHTS)
    ]
    if complaints:
        listed = "".join(f"\n  {complaint}" for complaint in sorted(complaints))
        raise ValueError(f"the tensors of {what} do not fit its configuration:{listed}")


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``destination`` on success and is removed on an error.

    Raises:
        ValueError: the destination exists and is not an empty folder.
        OSError: writing fails, for instance because the disk is full.

    """
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder; choose another destination")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if destination.is_dir():
            destination.rmdir()
        os.replace(temporary, destination)
    except Exception as error:
        if not _is_disk_error(error):
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"{destination} cannot be written ({reason}); free disk space or choose another destination; "
            "the partial output was removed"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_disk_error(error: Exception) -> bool:
    """Return whether an error is a write failure; the writers in Rust and C++ have their own error types."""
    signs = ("No space left", "os error", "PytorchStreamWriter", "inline_container")
    return isinstance(error, OSError | SafetensorError) or any(sign in str(error) for sign in signs)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_pickle(folder: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
    """Write ``pytorch_model.bin``, or shards with an index if it would exceed ``max_shard_bytes``."""
    write_shards(folder, tensors, PICKLE, torch.save, max_shard_bytes=max_shard_bytes)


def write_shards(
    folder: Path,
    tensors: Mapping[str, Tensor],
    name: str,
    save: Callable[[dict[str, Tensor], Path], None],
    *,
    max_shard_bytes: int,
) -> None:
    """Write tensors as the file ``name``, or as shards with an index if it would exceed ``max_shard_bytes``.

    ``save`` writes one file. It receives copies, because pickles contain the whole storage of a view, and
    safetensors neither views nor a tensor twice.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor.detach().clone().contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save(shards[0], folder / name)
        return
    stem, _, suffix = name.rpartition(".")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{name}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
