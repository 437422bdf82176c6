"""Rows whose search has diverged are kept out of what is differentiated.

A gradient of weights is a sum over rows: one row of NaN would make every gradient, and the loss, NaN.

Shape legend: B batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, RowMap, SearchLike
from implicit_blocks.search.loop import still_at_padding
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


class Found(NamedTuple):
    """A solution, and one differentiable call of the map at it."""

    solution: Solution
    z: Tensor
    """The point, a leaf of the graph; rows that have diverged evaluate another row, or their start."""
    fz: Tensor
    """The map's value there."""
    has_diverged: bool
    """Whether some rows have diverged, but not all."""
    valid: Tensor | None
    """False at padding of these rows, (B, L) bool; None: there is none."""

    def restore(self, value: Tensor) -> Tensor:
        """Return ``value`` (B, …) with the search's values in rows that have diverged, without a gradient."""
        return restore_diverged(value, self.solution.z, self.solution) if self.has_diverged else value


def call_at_solution(f: Map, z0: Tensor, search: SearchLike) -> Found:
    """Search from ``z0`` (B, …), then call ``f`` once at the result, with gradients and without bad rows.

    Padding keeps its start, a constant: an adjoint would otherwise depend on the map there.
    """
    solution = search(f, z0)
    z, has_diverged = solution.z, solution.some_diverged()
    valid = getattr(search, "valid", None)  # a plain function has none
    if has_diverged:
        f, rows = replace_diverged(f, z0, solution)
        z, valid = z[rows], None if valid is None else valid[rows]
    z = z.detach().requires_grad_()
    return Found(solution, z, still_at_padding(f(z), z.detach(), valid), has_diverged, valid)


def _fixed_at_start(f: Map, z0: Tensor, solution: Solution) -> Map:
    def fixed(z: Tensor) -> Tensor:
        return restore_diverged(f(restore_diverged(z, z0, solution)), z0, solution)

    return fixed


def restore_diverged(value: Tensor, kept: Tensor, solution: Solution) -> Tensor:
    """Return ``value`` (B, …) with the rows that have diverged taken from ``kept``, without a gradient."""
    return torch.where(solution.diverged.view(-1, *[1] * (value.ndim - 1)), kept.detach(), value)
