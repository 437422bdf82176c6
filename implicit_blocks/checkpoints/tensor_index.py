"""The index of a checkpoint's tensors: a JSON file, ``tensors.json``, and the pickle of earlier checkpoints.

The index contains the shape and type of each tensor and, for every chunk, its file and position in that
file. ``torch.distributed.checkpoint`` stores it as a pickle, ``.metadata``, which can execute code when it is
read; therefore the trainer writes JSON. Checkpoints of format 2 still have the pickle: it is read with inert
stand-ins for the classes that it may name, and nothing that it names is imported or called.

Both files are untrusted, so everything read from them is checked: types, bounds, and that each file name
stays inside the folder.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from implicit_blocks.checkpoints.find import plain_name, read_json

INDEX = "tensors.json"
PICKLED_INDEX = ".metadata"
"""The index of checkpoints of format 2."""

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {value: str(value).removeprefix("torch.") for value in _DTYPES.values()}


def has_index(folder: Path) -> bool:
    """Return whether ``folder`` has an index of tensors in either format."""
    return any((folder / name).is_file() for name in (INDEX, PICKLED_INDEX))


def index_text(metadata: Metadata, results: Iterable[Iterable[Any]]) -> str:
    """Return the content of ``tensors.json``.

    Args:
        metadata: shapes, types and chunks of the tensors, as returned by the planner of a save.
        results: for each process, the chunks that it wrote (``WriteResult``).

    """
    stored = {result.index: result.storage_data for every in results for result in every}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name  # checkpoints contain only tensors
        chunks = []
        for chunk in entry.chunks:
            place = stored[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "bytes": place.length,
                }
            )
        dtype = _NAMES[entry.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return json.dumps({"format": 1, "tensors": tensors}, ensure_ascii=False) + "\n"


def read_index(folder: Path) -> Metadata:
    """Read the index of ``folder``, ``tensors.json`` or else ``.metadata``, without executing code from it.

    Raises:
        ValueError: both files are missing, or the file is truncated or not a valid index.

    """
    path = folder / INDEX
    try:
        if path.is_file():
            content = read_json(path)
        elif (path := folder / PICKLED_INDEX).is_file():
            content = _unpickled(path.read_bytes())
        else:
            raise ValueError(f"{folder} contains no tensors: {INDEX} is missing")
        return _metadata(content)
    except _InvalidIndexError as error:
        raise ValueError(f"{path} cannot be read as an index of tensors: {error}") from None


class _InvalidIndexError(Exception):
    """The reason why a file is not a valid index."""


# ------------------------------------------------------------------------------------ JSON


def _metadata(content: Any) -> Metadata:
    """Validate ``content`` and return the metadata of ``torch.distributed.checkpoint``."""
    if not isinstance(content, Mapping) or content.get("format") != 1:
        raise _InvalidIndexError("it is not a JSON object of format 1")
    metadata = Metadata({}, storage_data={})
    for name, entry in _mapping(content.get("tensors"), "tensors").items():
        entry = _mapping(entry, name)
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise _InvalidIndexError(f"{name} has the unknown type {entry.get('dtype')!r}")
        shape = _sizes(entry.get("shape"), name)
        if not isinstance(entry.get("chunks"), list):
            raise _InvalidIndexError(f"{name} has no list of chunks")
        chunks, places = [], {}
        for chunk in entry["chunks"]:
            chunk = _mapping(chunk, f"a chunk of {name}")
            offsets, sizes = _sizes(chunk.get("offsets"), name), _sizes(chunk.get("shape"), name)
            file = chunk.get("file")
            if not isinstance(file, str) or not plain_name(file):
                raise _InvalidIndexError(f"{name} is stored in {file!r}, which is not a file in this folder")
            start, length = _sizes([chunk.get("start"), chunk.get("bytes")], name)
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise _InvalidIndexError(f"a chunk of {name} has a different number of dimensions")
            if any(a + b > c for a, b, c in zip(offsets, sizes, shape, strict=True)):
                raise _InvalidIndexError(f"a chunk of {name} exceeds its shape")
            if math.prod(sizes) * dtype.itemsize > length:
                raise _InvalidIndexError(f"a chunk of {name} has too few bytes for its shape")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, offsets)] = StorageInfo(file, start, length)
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        if len(places) != len(chunks) or covered != math.prod(shape):
            raise _InvalidIndexError(f"the chunks of {name} do not cover its shape")
        properties = TensorProperties(dtype=dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        metadata.storage_data.update(places)
    return metadata


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _InvalidIndexError(f"{what} is not a mapping")
    return value


def _sizes(value: Any, what: str) -> list[int]:
    if not isinstance(value, list | tuple) or not all(
        type(size) is int and 0 <= size < 2**62 for size in value
    ):
        raise _InvalidIndexError(f"{what} has sizes that are not non-negative integers")
    return list(value)


# ------------------------------------------------------------------------------------ pickle


class _StandIn:
    """An instance of a class that a pickled index names: its arguments and state, without behavior."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA, _FILESYSTEM = (f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem"))
_CLASSES = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_FILESYSTEM, "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }
)
"""The names in an index of format 2, besides ``torch.Size`` and tensor types."""


# The Python unpickler: the C one trusts sizes in the file and can allocate gigabytes for a few bytes.
class _IndexUnpickler(pickle._Unpickler):
    """Reads a pickle with a new stand-in for each listed class; every other name raises an error."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.stand_ins: dict[tuple[str, str], type[_StandIn]] = {
            name: type(name[1], (_StandIn,), {}) for name in _CLASSES
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.stand_ins:
            return self.stand_ins[module, name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an index of tensors")


def _unpickled(content: bytes) -> dict[str, Any]:
    """Convert a pickled index to the JSON form."""
    unpickler = _IndexUnpickler(io.BytesIO(content))
    try:
        found = unpickler.load()
    except Exception as error:  # the reader of a crafted pickle can raise anything
        raise _InvalidIndexError(f"{error}" or type(error).__name__) from None

    def of(name: str, value: Any, module: str = _METADATA) -> Any:
        if not isinstance(value, unpickler.stand_ins[module, name]):
            raise _InvalidIndexError(f"expected a {name}, found a {type(value).__name__}")
        return value.state

    def fields(name: str, value: Any, module: str = _METADATA) -> Mapping[str, Any]:
        return _mapping(of(name, value, module), f"the state of a {name}")

    index = fields("Metadata", found)
    places = {}
    if not isinstance(index.get("storage_data"), dict):
        raise _InvalidIndexError("the storage of the tensors is missing")
    for key, value in index["storage_data"].items():
        at, place = fields("MetadataIndex", key), fields("_StorageInfo", value, _FILESYSTEM)
        if place.get("transform_descriptors"):
            raise _InvalidIndexError("its files are transformed, which is not supported")
        places[str(at.get("fqn")), tuple(_sizes(at.get("offset", ()), "a place"))] = place
    tensors = {}
    for name, value in _mapping(index.get("state_dict_metadata"), "state_dict_metadata").items():
        entry = fields("TensorStorageMetadata", value)
        properties = of("TensorProperties", entry.get("properties"))
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, torch.dtype) or not isinstance(entry.get("chunks"), list):
            raise _InvalidIndexError(f"{name} has no type or no list of chunks")
        chunks = []
        for chunk in entry["chunks"]:
            part = fields("ChunkStorageMetadata", chunk)
            place = places.get((name, tuple(_sizes(part.get("offsets"), name))), {})
            chunks.append(
                {
                    "offsets": part["offsets"],
                    "shape": part.get("sizes"),
                    "file": place.get("relative_path"),
                    "start": place.get("offset"),
                    "bytes": place.get("length"),
                }
            )
        tensors[name] = {"dtype": _NAMES[dtype], "shape": entry.get("size"), "chunks": chunks}
    return {"format": 1, "tensors": tensors}
