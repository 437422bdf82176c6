"""Copying a run's state out of the way before it is written: which tensors a rank copies, and to where.

Training waits for the copies, not for the writing. So a rank copies only what it writes itself, and from a
GPU into page-locked memory, which is kept from one save to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from trainer.distributed import Ranks


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

    Locking pages takes longer than the copy that it makes fast, so it is done once: the copies stay, as much
    memory of the host as a rank's share of weights and optimizer state. What was returned before is
    overwritten.
    """

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self.kept = device.type == "cuda" and pin
        """Whether copies are page-locked and kept."""
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._names: frozenset[tuple[str, torch.Size]] = frozenset()

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tensors' copies, by the same names; done when this returns."""
        # Counters of single numbers: a page each would be locked for four bytes.
        small = {name: tensor.cpu().clone() for name, tensor in tensors.items() if tensor.dim() == 0}
        large = {name: tensor for name, tensor in tensors.items() if name not in small}
        names = frozenset((name, tensor.shape) for name, tensor in large.items())
        if names != self._names:  # such as moments that came later: its copies are of other tensors
            self._stager, self._names = BlockingAsyncStager(cache_staged_state_dict=True), names
        staged: dict[str, Any] = self._stager.stage(large)
        return {**staged, **small}
