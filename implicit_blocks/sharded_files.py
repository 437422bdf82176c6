"""Reading tensors that several processes wrote together, by ``torch.distributed.checkpoint``.

Such a folder holds files ``__RANK_NUMBER.distcp`` and an index, ``.metadata``, which is a pickle. Here it is
unpickled with nothing but the classes of which an index consists, so that a folder from a stranger can't run
code; the tensors themselves are read by torch as weights only.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

INDEX = ".metadata"

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module in _MODULES and "." not in name) or (module, name) in _OTHERS
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")


class ShardReader(FileSystemReader):
    """The reader of ``torch.distributed.checkpoint``, with an index that runs no code.

    Raises:
        ValueError: where the index is missing, cut short or more than an index.

    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index; see the class."""
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no tensors: {INDEX} is missing") from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise ValueError(f"{path} cannot be read as an index of tensors: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} is no index of tensors: it holds a {type(metadata).__name__}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def expect_one_process() -> None:
    """Keep ``torch.distributed.checkpoint`` from warning that only one process is there: that is meant."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def tensor_index(folder: Path, *, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return names, sizes and types of the tensors in ``folder`` whose names begin with ``prefix``.

    The prefix is left out of the names. Raises ValueError as :class:`ShardReader` does.
    """
    entries = ShardReader(folder).read_metadata().state_dict_metadata
    return {
        name[len(prefix) :]: entry
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def read_whole_tensors(folder: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of ``folder`` whose names begin with ``prefix``, put together, in one process.

    Checksums are not looked at (``saved_files.require_whole`` does). Raises ValueError as
    :class:`ShardReader` does, and where a file of tensors is missing or can't be read.
    """
    found = {
        prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensor_index(folder, prefix=prefix).items()
    }
    expect_one_process()
    try:
        load(found, storage_reader=ShardReader(folder), no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        raise ValueError(
            f"the tensors in {folder} cannot be read; a file is missing or cut short: {causes}"
        ) from error
    return {name[len(prefix) :]: tensor for name, tensor in found.items()}
