"""Staging: copies of a rank's share of the tensors in host memory, from which a checkpoint is written.

Training waits for the copies but not for the writing. A rank therefore copies only the tensors that it
writes, and copies from a GPU to page-locked memory that is reused by the next save.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.distributed import Ranks
from trainer.distributed.tensor_parts import local_part

_LOG = logging.getLogger(__name__)


def own_share(
    tensors: Mapping[str, Tensor], ranks: Ranks, *, divided: Collection[str] = (), tensor_ranks: int = 1
) -> dict[str, Tensor]:
    """Return the tensors that this rank saves; replicated tensors are divided among the ranks by size.

    Every rank must pass tensors of the same names and sizes in the same order. The ranks that hold the shards
    save a sharded tensor; with several groups that each hold all shards (hsdp), one of the groups. Of the
    tensors named in ``divided`` each of ``tensor_ranks`` consecutive ranks has another part.
    """
    loads: dict[int, list[int]] = {}
    share = {}
    for name, tensor in tensors.items():
        holders, own = _replica(tensor, ranks, tensor_ranks, divided=name in divided)
        load = loads.setdefault(holders, [0] * holders)
        least = load.index(min(load))
        load[least] += tensor.numel() * tensor.element_size()
        if least == own:
            share[name] = tensor
    return share


def _replica(tensor: Tensor, ranks: Ranks, tensor_ranks: int, *, divided: bool) -> tuple[int, int]:
    """Return the number of replicas of a tensor over the ranks, and the index of this rank's replica."""
    copies, own = ranks.world_size // tensor_ranks, ranks.rank // tensor_ranks
    if isinstance(tensor, DTensor):
        copies, own = 1, 0
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None  # every rank is part of a run's mesh
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                size = tensor.device_mesh.size(dimension)
                copies, own = copies * size, own * size + coordinate[dimension]
    if divided:
        return copies, own
    return copies * tensor_ranks, own * tensor_ranks + ranks.rank % tensor_ranks


class Staging:
    """Copies tensors to host memory; those on CUDA to page-locked memory that is reused.

    Allocating and locking pages takes longer than the copy itself, so it is done once. The memory, as large
    as a rank's share of weights and optimizer state, stays allocated, and each call overwrites the previous
    copies.
    """

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self.kept = device.type == "cuda" and pin
        """Whether copies are page-locked and reused."""
        self._copies: dict[str, Tensor] = {}
        self._of: frozenset[tuple[str, torch.Size, torch.dtype]] = frozenset()
        self._release: Callable[[], object] | None = None

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return copies of the tensors, by name; the copies are complete on return."""
        # Scalars such as step counters.
        small = {name: tensor.cpu().clone() for name, tensor in tensors.items() if tensor.dim() == 0}
        large = {name: tensor.detach() for name, tensor in tensors.items() if name not in small}
        of = frozenset((name, tensor.shape, tensor.dtype) for name, tensor in large.items())
        if of != self._of:  # such as moments that were created after the first save
            self._make_room(large)
            self._of = of
        for name, tensor in large.items():
            local_part(self._copies[name]).copy_(local_part(tensor), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return {**self._copies, **small}

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for the copies, in one block of exactly the size needed."""
        self._copies = {}
        if self._release is not None:
            self._release()
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-local_part(tensor).nbytes // ALIGNED) * ALIGNED
        memory = _resident(max(size, ALIGNED))
        if _lock(memory):
            self._release = weakref.finalize(self, _unlock, memory)
        for name, tensor in tensors.items():
            own, first = local_part(tensor), places[name]
            room = memory[first : first + own.nbytes].view(own.dtype).view(own.shape)
            if isinstance(tensor, DTensor):  # the same shard of the same tensor
                whole: Any = torch.empty_like(tensor, device="meta")
                whole._local_tensor = room
                self._copies[name] = whole
            else:
                self._copies[name] = room


ALIGNED = 512  # bytes
_THREADS = 8  # for the first touch of the pages; under torchrun torch itself has one thread


def _resident(size: int) -> Tensor:
    """Return ``size`` bytes of resident memory, in huge pages if the system has them."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(Tensor.zero_, tensor.chunk(4 * _THREADS)))
    return tensor


def _lock(memory: Tensor) -> bool:
    """Page-lock the memory, so that the GPU copies directly; return whether this succeeded."""
    portable = 1
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))
    if error:
        _LOG.warning("pages can't be locked (CUDA error %d): checkpoints are copied at half the speed", error)
    return not error


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
