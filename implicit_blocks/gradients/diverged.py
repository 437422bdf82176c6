"""Keeping rows whose search has diverged out of what is differentiated.

A gradient of weights is a sum over rows: one row of NaN would be NaN in every weight, and in the loss.

Shape legend: B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.interfaces import Map, RowMap
from implicit_blocks.solution import Solution


def replace_diverged(f: Map, z0: Tensor, solution: Solution) -> tuple[Map, Tensor | None]:
    """Return a map that is sound in every row, and of which row each of its rows is, (B,) int64 indices.

    In the place of a row that has diverged stands another one where ``f`` is a ``RowMap``, so that shapes
    stay those that kernels were compiled for. Elsewhere that row stands still at its start in ``z0`` (B, …),
    where ``f`` was finite, unless the row was lost in its very first call. Give the row back what it had by
    ``restore_diverged``. The map itself and None where no row has diverged, or where all have.
    """
    diverged = solution.diverged
    if not AsyncHostCopy().read(diverged.any() & ~diverged.all()):
        return f, None
    own = torch.arange(diverged.numel(), device=diverged.device)
    if not isinstance(f, RowMap):
        return _standing_still(f, z0, solution), own
    another = torch.argmin(diverged.to(torch.uint8))
    rows = torch.where(diverged, another, own)
    return f.select_rows(rows), rows


def _standing_still(f: Map, z0: Tensor, solution: Solution) -> Map:
    def held(z: Tensor) -> Tensor:
        return restore_diverged(f(restore_diverged(z, z0, solution)), z0, solution)

    return held


def restore_diverged(value: Tensor, kept: Tensor, solution: Solution) -> Tensor:
    """Return ``value`` (B, …) with what ``kept`` has in the rows that have diverged."""
    return torch.where(solution.diverged.view(-1, *[1] * (value.ndim - 1)), kept.detach(), value)
