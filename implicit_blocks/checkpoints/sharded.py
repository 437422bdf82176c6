"""Reading tensors that several processes wrote with ``torch.distributed.checkpoint``.

Such a folder contains files ``__RANK_NUMBER.distcp``, whose tensors torch reads as weights only, and an index
(:mod:`implicit_blocks.checkpoints.tensor_index`). Reading an untrusted folder executes no code.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from implicit_blocks.checkpoints.tensor_index import read_index


class ShardReader(FileSystemReader):
    """A reader for ``torch.distributed.checkpoint`` whose index cannot execute code.

    Raises:
        ValueError: the index is missing, truncated or invalid.

    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index."""
        metadata = read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def expect_one_process() -> None:
    """Suppress the warning of ``torch.distributed.checkpoint`` about running in a single process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def tensor_index(folder: Path, *, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return names, sizes and types of the tensors in ``folder`` whose names start with ``prefix``.

    The returned names omit the prefix. Raises ValueError as :class:`ShardReader` does.
    """
    return {
        name[len(prefix) :]: entry
        for name, entry in read_index(folder).state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(folder: Path, into: dict[str, Tensor], *, one_process: bool = True) -> None:
    """Read tensors of ``folder`` into the tensors of ``into``, which may be sharded.

    Args:
        folder: contains an index.
        into: tensors by their full names, with the stored shapes.
        one_process: only this process reads; otherwise every process of the default group calls this.

    Raises:
        ValueError: as :class:`ShardReader` does, or a file of tensors is missing or cannot be read.

    """
    expect_one_process()
    try:
        load(into, storage_reader=ShardReader(folder), no_dist=one_process)
    except CheckpointException as error:
        causes = "; ".join(
            f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            for cause, _ in error.failures.values()
        )
        raise ValueError(
            f"the tensors in {folder} cannot be read; a file is missing or truncated: {causes}"
        ) from error


def read_whole_tensors(folder: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Read the full tensors of ``folder`` whose names start with ``prefix``, in one process.

    Checksums are not verified (``find.require_whole`` does that). Raises ValueError as :func:`load_tensors`
    does.
    """
    try:
        found = {
            prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in tensor_index(folder, prefix=prefix).items()
        }
    except RuntimeError as error:  # sizes that exceed this machine's memory
        raise ValueError(f"the tensors in {folder} cannot be read: {error}") from None
    load_tensors(folder, found)
    return {name[len(prefix) :]: tensor for name, tensor in found.items()}
