"""Weights in 8-bit floats for the first calls of a search, in memory that is kept from pass to pass."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.layers import Linear
from implicit_blocks.ops.float8 import Float8Weight, device_obstacle, quantize_, weight_obstacle
from implicit_blocks.weights.cache import WeightCache

_LOG = logging.getLogger(__name__)


class QuantizedWeights:
    """The weights of a stack of layers in 8-bit floats, quantized once per pass from its weight cache.

    All passes use the same memory, so that captured graphs read it in place. Weights that cannot be quantized
    keep their precision. Where no weight can be quantized, searches run in full precision; the log contains
    the reason once.
    """

    def __init__(self) -> None:
        self._weights: WeightCache | None = None
        self._of: ReferenceType[WeightCache] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> QuantizedWeights:
        return QuantizedWeights()  # weights belong to the modules that they were made of

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]  # the empty state of a copy

    @torch.no_grad()
    def of(self, cached: WeightCache) -> WeightCache | None:
        """Return the quantized weights of a pass; None: none of them can be quantized."""
        if self._weights is not None and self._of is not None and self._of() is cached:
            return self._weights
        if self._weights is None or not _filled(self._weights, cached):
            tensors = cached.tensors()
            why = device_obstacle(tensors[0].device) if tensors else "no weights are cached"
            with torch.inference_mode(False):
                self._weights = None if why else _room(cached)
            if self._weights is None:
                _report_once(why or "no linear layer has a supported weight")
                return None
            _filled(self._weights, cached)
        self._of = ref(cached)
        return self._weights


class _Room(WeightCache):
    low_precision = True


def _room(cached: WeightCache) -> WeightCache | None:
    """Return memory for the quantized weights of a cache; None: none of them can be quantized."""
    room, found = _Room(), False
    for holder, value in cached.items():
        why = _obstacle(holder, value) if isinstance(holder, Linear) else ""
        if why is None:
            weight, bias = value
            found = True
            room.append(holder, (Float8Weight.like(weight), None if bias is None else torch.empty_like(bias)))
            continue
        if why:
            _report_layer_once(why)
        room.append(holder, pytree.tree_map_only(Tensor, torch.empty_like, value))
    return room if found else None


def _obstacle(layer: Linear, value: Any) -> str | None:
    """Return the reason why a linear layer stays in full precision, or None."""
    if type(layer).forward is not Linear.forward:
        return f"{type(layer).__name__} computes its own product"
    return weight_obstacle(value[0])


def _filled(room: WeightCache, cached: WeightCache) -> bool:
    """Quantize and copy the weights of a pass; False where the memory is not that of these weights.

    It must be of the same modules, shapes, dtypes and devices. The device waits for this function.
    """
    before, now = room.items(), cached.items()
    if len(before) != len(now):
        return False
    codes, sources = list[Float8Weight](), list[Tensor]()
    kept, given = list[Tensor](), list[Tensor]()
    for (holder, own), (other, new) in zip(before, now, strict=True):
        if holder is not other:
            return False
        pairs = zip(own, new, strict=True) if isinstance(new, tuple) else ((own, new),)
        for room_part, part in pairs:
            if isinstance(room_part, Float8Weight):
                if (room_part.rows, room_part.codes.shape[1]) != part.shape or room_part.dtype != part.dtype:
                    return False
                codes.append(room_part)
                sources.append(part.detach())
            elif part is not None:
                if room_part.shape != part.shape or room_part.dtype != part.dtype:
                    return False
                kept.append(room_part)
                given.append(part.detach())
    if sources and sources[0].device != codes[0].codes.device:
        return False
    quantize_(codes, sources)
    if kept:
        torch._foreach_copy_(kept, given)
    return True


@cache
def _report_once(reason: str) -> None:
    _LOG.warning("searches in training use full precision, not 8-bit floats: %s", reason)


@cache
def _report_layer_once(reason: str) -> None:
    _LOG.info("a linear layer stays in full precision in searches with 8-bit floats: %s", reason)
