"""Reading tensors that several processes wrote together, by ``torch.distributed.checkpoint``.

Such a folder holds files ``__RANK_NUMBER.distcp``, whose tensors torch reads as weights only, and an index of
them (:mod:`implicit_blocks.checkpoints.tensor_index`). A folder from a stranger can't run code.
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
    """The reader of ``torch.distributed.checkpoint``, with an index that runs no code.

    Raises:
        ValueError: where the index is missing, cut short or not a valid index.

    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index; see the class."""
        metadata = read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def expect_one_process() -> None:
    """Keep ``torch.distributed.checkpoint`` from warning that only one process is there: that is meant."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def tensor_index(folder: Path, *, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return names, sizes and types of the tensors in ``folder`` whose names begin with ``prefix``.

    The prefix is left out of the names. Raises ValueError as :class:`ShardReader` does.
    """
    return {
        name[len(prefix) :]: entry
        for name, entry in read_index(folder).state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(folder: Path, into: dict[str, Tensor], *, one_process: bool = True) -> None:
    """Read the tensors of ``folder`` that ``into`` names into its tensors, which may be sharded.

    Args:
        folder: with an index.
        into: tensors by their whole names, of the stored shapes.
        one_process: this one alone; otherwise every process of the default group calls this.

    Raises:
        ValueError: as :class:`ShardReader` does, and where a file of tensors is missing or can't be read.

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
            f"the tensors in {folder} cannot be read; a file is missing or cut short: {causes}"
        ) from error


def read_whole_tensors(folder: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of ``folder`` whose names begin with ``prefix``, put together, in one process.

    Checksums are not looked at (``saved_files.require_whole`` does). Raises ValueError as
    :func:`load_tensors` does.
    """
    try:
        found = {
            prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in tensor_index(folder, prefix=prefix).items()
        }
    except RuntimeError as error:  # sizes beyond this machine's memory
        raise ValueError(f"the tensors in {folder} cannot be read: {error}") from None
    load_tensors(folder, found)
    return {name[len(prefix) :]: tensor for name, tensor in found.items()}
