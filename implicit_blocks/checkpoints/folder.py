"""Reading the tensors of a folder, and writing folders whole or not at all.

Reads what transformers and the published implementation leave: ``model.safetensors`` or
``pytorch_model.bin``, one file or shards with an index. Pickles are read as weights only: nothing in them
is executed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
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
        ValueError: where the folder is none, or has no configuration that can be read.

    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one with {CONFIG} and weights")
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no {CONFIG}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a mapping; it is no configuration")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, from whichever of the known files are there.

    Raises:
        ValueError: where there are none, a shard is missing, cut short or without tensors that the index
            promises, or a pickle holds more than weights.

    """
    for name in (SAFETENSORS, PICKLE):
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(index)
        if (folder / name).is_file():
            return read_file(folder / name)
    raise ValueError(
        f"{folder} has no weights; {SAFETENSORS} or {PICKLE} is expected, or shards with an index"
    )


def read_file(path: Path) -> dict[str, Tensor]:
    """Read one file of tensors, without copying what need not be.

    Raises:
        ValueError: where it is cut short, holds more than weights, or holds something else.

    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} holds more than weights and is not read, because unpickling it could run anything: "
            f"{reason}"
        ) from None
    except Exception as error:  # a crafted file can make its reader raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} cannot be read; it is cut short or no file of torch: {reason}") from None
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise ValueError(f"{path} is no state dict: a mapping of names to tensors is expected")
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(
                f"{path}: {name} is sparse, quantized or without values; save it as a plain tensor"
            )
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, for which it has too few bytes"
            )
    return dict(found)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # a crafted header can make its reader raise anything
        raise ValueError(f"{path} cannot be read; it is cut short or no safetensors file: {error}") from None
    try:
        aliases = json.loads(metadata.get("aliases", "{}"))
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(
        isinstance(name, str) and name in tensors and alias not in tensors for alias, name in aliases.items()
    ):
        raise ValueError(
            f"{path}: the header's aliases are not a JSON object of new names for its tensors; "
            "save the file again, or remove them"
        )
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}  # tensors that were shared


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        names = list(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index: a JSON mapping with a weight_map is expected") from None
    for name in names:
        if not isinstance(name, str) or not plain_name(name):
            raise ValueError(
                f"{index}: the weight_map names {name!r}, which is not a file of {index.parent}; "
                "put all shards into one folder"
            )
    files = sorted(set(names))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks {len(missing)} of {len(files)} shards: {', '.join(missing)}")
    found: dict[str, Tensor] = {}
    for file in files:
        shard = read_file(index.parent / file)
        if twice := sorted(found.keys() & shard.keys()):
            raise ValueError(f"{index.parent} has {twice[0]} in several shards, {file} among them")
        found |= shard
    lost = sorted(weight_map.keys() - found.keys())
    if lost:
        raise ValueError(f"the shards of {index.parent} lack tensors that the index names: {', '.join(lost)}")
    return found


_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, what: str) -> None:
    """Compare names, shapes and types: weights have any of the types that a model is trained or stored in.

    Raises:
        ValueError: lists all that is missing, unknown, or of another shape or kind of type.

    """
    complaints = [
        f"{name} is missing, {tuple(expected[name].shape)}" for name in expected.keys() - given.keys()
    ]
    complaints += [
        f"{name} is unknown, {tuple(given[name].shape)}" for name in given.keys() - expected.keys()
    ]
    complaints += [
        f"{name} has shape {tuple(given[name].shape)} and should have {tuple(expected[name].shape)}"
        for name in given.keys() & expected.keys()
        if given[name].shape != expected[name].shape
    ]
    complaints += [
        f"{name} has type {_type(given[name].dtype)} and should have "
        + (
            " or ".join(map(_type, _WEIGHTS))
            if expected[name].dtype in _WEIGHTS
            else _type(expected[name].dtype)
        )
        for name in given.keys() & expected.keys()
        if given[name].dtype != expected[name].dtype
        and not (given[name].dtype in _WEIGHTS and expected[name].dtype in _WEIGHTS)
    ]
    if complaints:
        listed = "".join(f"\n  {complaint}" for complaint in sorted(complaints))
        raise ValueError(f"the tensors of {what} do not fit its configuration:{listed}")


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes ``destination`` at the end, or is removed after an error.

    Raises:
        ValueError: where the destination exists and is not an empty folder.
        OSError: it can't be written, such as to a full disk.

    """
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination} exists already and is not an empty folder; choose another place")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if destination.is_dir():
            destination.rmdir()
        os.replace(temporary, destination)
    except Exception as error:
        if not _of_the_disk(error):
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"{destination} can't be written ({reason}); make room, or choose another place; "
            "what had been written is removed"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _of_the_disk(error: Exception) -> bool:
    """Return whether writing failed: the writers in Rust and C++ raise errors of their own kinds."""
    signs = ("No space left", "os error", "PytorchStreamWriter", "inline_container")
    return isinstance(error, OSError | SafetensorError) or any(sign in str(error) for sign in signs)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_pickle(folder: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
    """Write ``pytorch_model.bin``, or shards with an index where it would be larger than a shard may be."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        # A clone, because torch.save writes the whole storage that a view belongs to.
        shards[-1][name] = tensor.detach().clone()
        size += tensor.nbytes
    if len(shards) == 1:
        torch.save(shards[0], folder / PICKLE)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"pytorch_model-{number:05d}-of-{len(shards):05d}.bin"
        torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{PICKLE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
