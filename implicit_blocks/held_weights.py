"""Weights made ready once a forward pass: weight norm computed, cast for autocast, padded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from implicit_blocks.layers import Linear, SwiGLU
from implicit_blocks.weight_norm import WeightNorm

WEIGHTS_COME_AND_GO = "weights_come_and_go"
"""Name of the attribute that is true for a module that has its weights only while it runs."""


class HeldWeights:
    """The weights of modules as they are now, to be used for as many calls as wanted.

    Layers that have their weights only while they run (`WEIGHTS_COME_AND_GO`, as where each is gathered from
    other processes for its turn) are left to make them ready themselves.

    Made once a forward pass, outside the fixed-point loop, in the gradient and autocast mode of the caller; a
    call made inside ``with held.in_use():`` uses them, in the loop as in a later recomputation for backward.
    Gradients flow to the parameters through the one computation.
    """

    def __init__(self, *modules: nn.Module) -> None:
        # Holders have an attribute ``held``: our linear layers, and the weight norm of anything else.
        self._held: list[tuple[Any, Any]] = []
        for part in (part for module in modules for part in _modules(module)):
            if isinstance(part, SwiGLU):
                part.choose_padding()  # before its layers' turn
            elif isinstance(part, Linear):
                self._held.append((part, part.prepared()))
            elif parametrize.is_parametrized(part, "weight"):
                chain: Any = part.parametrizations["weight"]  # type: ignore[index]  # a ModuleDict, once parametrized
                if isinstance(chain[0], WeightNorm):
                    weight: Tensor = WeightNorm.compute(chain.original0, chain.original1)
                    self._held.append((chain[0], weight))

    def copied(self) -> HeldWeights:
        """Return the same weights in memory of their own, without gradients."""
        copy = HeldWeights()
        copy._held = [
            (holder, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value))
            for holder, value in self._held
        ]
        return copy

    @torch.no_grad()
    def load_(self, other: HeldWeights) -> None:
        """Take the values of the same modules' weights."""
        torch._foreach_copy_(self.tensors(), other.tensors())

    def as_leaves(self, other: HeldWeights) -> HeldWeights:
        """Return the same memory as leaves of autograd, where the weights of ``other`` carry gradients."""
        leaves = HeldWeights()
        carry = iter([t.requires_grad for t in other.tensors()])
        leaves._held = [
            (holder, pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(next(carry)), value))
            for holder, value in self._held
        ]
        return leaves

    def tensors(self) -> list[Tensor]:
        """Return all of them, in a fixed order."""
        leaves = pytree.tree_leaves([value for _, value in self._held])
        return [leaf for leaf in leaves if leaf is not None]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the held weights within; where they are in use already this costs nothing."""
        if self._held and self._held[0][0].held is self._held[0][1]:
            yield
            return
        before = [holder.held for holder, _ in self._held]
        for holder, value in self._held:
            holder.held = value
        try:
            yield
        finally:
            for (holder, _), value in zip(self._held, before, strict=True):
                holder.held = value


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    if getattr(module, WEIGHTS_COME_AND_GO, False):
        return
    yield module
    for child in module.children():
        yield from _modules(child)
