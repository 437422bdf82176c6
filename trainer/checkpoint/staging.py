"""Copying a run's state out of the way before it is written: which tensors a rank copies, and to where.

Training waits for the copies, not for the writing. So a rank copies only what it writes itself, and from a
GPU into page-locked memory, which is kept from one save to the next.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.distributed import Ranks

_LOG = logging.getLogger(__name__)


def own_share(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors that this rank saves, of those that several ranks hold alike a share of their size.

    Every rank must give tensors of the same names and sizes, in the same order. What is sharded is saved by
    those that hold the shards; with groups of ranks that each hold all of it (hsdp), by one of the groups.
    """
    loads: dict[int, list[int]] = {}
    share = {}
    for name, tensor in tensors.items():
        holders, own = _replica(tensor, ranks)
        load = loads.setdefault(holders, [0] * holders)
        least = load.index(min(load))
        load[least] += tensor.numel() * tensor.element_size()
        if least == own:
            share[name] = tensor
    return share


def _replica(tensor: Tensor, ranks: Ranks) -> tuple[int, int]:
    """Return how many copies of a tensor there are over the ranks, and which of them this rank's is."""
    if not isinstance(tensor, DTensor):
        return ranks.world_size, ranks.rank
    copies, own = 1, 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is part of a run's mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dimension)
            copies, own = copies * size, own * size + coordinate[dimension]
    return copies, own


class Staging:
    """Copies tensors to the memory of the host; those on CUDA to page-locked memory, kept for the next time.

    Getting and locking pages takes longer than the copy that it makes fast, so it is done once: the copies
    stay, as much memory of the host as a rank's share of weights and optimizer state. What was returned
    before is overwritten.
    """

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self.kept = device.type == "cuda" and pin
        """Whether copies are page-locked and kept."""
        self._copies: dict[str, Tensor] = {}
        self._of: frozenset[tuple[str, torch.Size, torch.dtype]] = frozenset()
        self._release: Callable[[], object] | None = None

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tensors' copies, by the same names; done when this returns."""
        # Counters of single numbers: each by itself would be a copy from the GPU of four bytes.
        small = {name: tensor.cpu().clone() for name, tensor in tensors.items() if tensor.dim() == 0}
        large = {name: tensor.detach() for name, tensor in tensors.items() if name not in small}
        of = frozenset((name, tensor.shape, tensor.dtype) for name, tensor in large.items())
        if of != self._of:  # such as moments that came later: the copies are of other tensors
            self._make_room(large)
            self._of = of
        for name, tensor in large.items():
            _own(self._copies[name]).copy_(_own(tensor), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return {**self._copies, **small}

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Get memory for the copies: all of it in one piece, exactly as large."""
        self._copies = {}
        if self._release is not None:
            self._release()
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-_own(tensor).nbytes // ALIGNED) * ALIGNED
        memory = _resident(max(size, ALIGNED))
        if _lock(memory):
            self._release = weakref.finalize(self, _unlock, memory)
        for name, tensor in tensors.items():
            own, first = _own(tensor), places[name]
            room = memory[first : first + own.nbytes].view(own.dtype).view(own.shape)
            if isinstance(tensor, DTensor):  # the same shard of the same whole
                whole: Any = torch.empty_like(tensor, device="meta")
                whole._local_tensor = room
                self._copies[name] = whole
            else:
                self._copies[name] = room


ALIGNED = 512  # bytes
_THREADS = 8  # that touch pages; under torchrun torch itself has one


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resident(size: int) -> Tensor:
    """Return so many bytes whose pages are all there, large ones where the system has them."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(Tensor.zero_, tensor.chunk(4 * _THREADS)))
    return tensor


def _lock(memory: Tensor) -> bool:
    """Lock the pages, so that the GPU copies into them by itself; whether that could be done."""
    portable = 1
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))
    if error:
        _LOG.warning("pages can't be locked (CUDA error %d): checkpoints are copied at half the speed", error)
    return not error


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
