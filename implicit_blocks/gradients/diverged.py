"""Rows whose search has diverged are kept out of what is differentiated.

A gradient of weights is a sum over rows: one row of NaN would make every gradient, and the loss, NaN.

Shape legend: B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, RowMap
from implicit_blocks.solution import Solution


def replace_diverged(f: Map, z0: Tensor, solution: Solution) -> tuple[Map, Tensor]:
    """Return a map that is finite in every row, and the row that each of its rows evaluates, (B,) int64.

    For solutions where some rows have diverged, but not all (``Solution.some_diverged``). If ``f`` is a
    ``RowMap``, another row replaces each row that has diverged, so that shapes stay those that kernels were
    compiled for. Otherwise that row is fixed at its start in ``z0`` (B, …), where ``f`` was finite unless the
    row diverged in its first call. ``restore_diverged`` gives these rows their values back.
    """
    diverged = solution.diverged
    own = torch.arange(diverged.numel(), device=diverged.device)
    if not isinstance(f, RowMap):
        return _fixed_at_start(f, z0, solution), own
    another = torch.argmin(diverged.to(torch.uint8))
    rows = torch.where(diverged, another, own)
    return f.select_rows(rows), rows


def _fixed_at_start(f: Map, z0: Tensor, solution: Solution) -> Map:
    def fixed(z: Tensor) -> Tensor:
        return restore_diverged(f(restore_diverged(z, z0, solution)), z0, solution)

    return fixed


def restore_diverged(value: Tensor, kept: Tensor, solution: Solution) -> Tensor:
    """Return ``value`` (B, …) with the rows that have diverged taken from ``kept``, without a gradient."""
    return torch.where(solution.diverged.view(-1, *[1] * (value.ndim - 1)), kept.detach(), value)
