"""Differentiable communication between the ranks of a group.

Conjugate pairs, as in M. Shoeybi et al., "Megatron-LM", 2019: ``copied`` where the ranks begin to compute
different parts from the same input, ``summed`` where their parts become one output again.

Shape legend: B any first dimension, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["copied", "gathered", "shared_sum", "summed"]

_Step = Callable[[Tensor, dist.ProcessGroup], Tensor]


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x`` (B, …), the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return _exchange(x, group, _same, _sum)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' ``x`` (B, …); its gradient, the same on all ranks, is that of each."""
    return _exchange(x, group, _sum, _same)


def shared_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' ``x`` (B, …), used in other ways by each: gradients are summed too."""
    return _exchange(x, group, _sum, _sum)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' ``x`` (B, …) by rank, (R, B, …); a rank's gradient is the sum over all that use it.

    All ranks must run the backward pass, also those that use no other rank's part: index the result instead
    of leaving it out.
    """
    return _exchange(x, group, _gather, _scatter_sum)


def _exchange(x: Tensor, group: dist.ProcessGroup, forward: _Step, backward: _Step) -> Tensor:
    y: Tensor = _Exchange.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


class _Exchange(torch.autograd.Function):
    """A linear exchange, and its transpose as the backward pass, which is differentiable in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: _Step, backward: _Step) -> Tensor:
        ctx.exchange = group, backward, forward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.exchange), None, None, None


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    every = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(every.unbind()), x.contiguous(), group=group)
    return every


def _scatter_sum(every: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = every.new_empty(every.shape[1:])
    dist.reduce_scatter(own, [part.contiguous() for part in every.unbind()], group=group)
    return own
