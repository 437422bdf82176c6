"""The search of many tokens, each at an iteration of its own.

What ``implicit_blocks.search.search`` does for tokens that begin together, for single tokens that begin
whenever the one before them is done: the same iterates, the same rule, the same report.

Shape legend: S slots, R of them in a step, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.ops.residual import (
    SMALLEST_SCALE,
    difference,
    initial_scale,
    narrow,
    norm,
    relative_residual,
)
from implicit_blocks.specs import Stopping


class SlotSearch:
    """One search a slot.

    ``z`` (S, D) is where each slot's map is to be called next; once a slot is ``done``, (S,) bool, it is the
    solution. ``iterations`` int64, ``residual`` and ``converged``, (S,), report as a ``Solution`` does.

    Args:
        solver: the update rule, None: nothing is searched for, and every start is the solution.
        stopping: tolerance, iterations, norm.
        slots: S.
        width: D.
        moving_average: α of an average over the iterates, or None.

    """

    def __init__(
        self,
        solver: Solver | None,
        stopping: Stopping | None,
        *,
        slots: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        moving_average: float | None = None,
    ) -> None:
        self.solver, self.stopping, self.moving_average = solver, stopping, moving_average
        self.z = torch.zeros(slots, width, device=device, dtype=dtype)
        self.best = torch.zeros_like(self.z)
        precision = torch.promote_types(dtype, torch.float32)
        self.residual = torch.zeros(slots, device=device, dtype=precision)
        self.scale, self.scale_limit = initial_scale(self.z, (slots,))
        self.iterations = torch.zeros(slots, device=device, dtype=torch.int64)
        self.converged = torch.zeros(slots, device=device, dtype=torch.bool)
        self.done = torch.zeros_like(self.converged)
        self.state: Any = () if solver is None else pytree.tree_map(torch.clone, solver.init(self.z))
        self.averages = None if moving_average is None else (self.z.clone(), self.z.clone())

    def begin(self, slots_R: Tensor, start_RD: Tensor, where_R: Tensor | None = None) -> None:
        """Begin a token in each of these slots, or in those of them that ``where_R``, (R,) bool, names."""
        where = torch.ones_like(slots_R, dtype=torch.bool) if where_R is None else where_R
        start = start_RD.to(self.z.dtype)
        self._put(self.z, slots_R, start, where)
        self._put(self.best, slots_R, start, where)
        self._put(self.residual, slots_R, torch.inf, where)
        self._put(self.scale, slots_R, SMALLEST_SCALE, where)
        self._put(self.iterations, slots_R, 0, where)
        self._put(self.converged, slots_R, False, where)
        self._put(self.done, slots_R, self.solver is None, where)
        if self.solver is not None:
            self._put_state(slots_R, self.solver.init(start), where)

    def take(self, rows_R: Tensor, fz_RD: Tensor, active_R: Tensor, f: Map) -> None:
        """Take in what the map returned for these slots' ``z``, where ``active_R`` says that they search.

        ``f`` is the map of the same slots, for solvers that call it themselves.
        """
        assert self.solver is not None
        assert self.stopping is not None
        z = self.z[rows_R]
        point, value = self._averaged(rows_R, z, fz_RD)
        residual = self._residual(rows_R, point, value)
        finite = residual.isfinite()
        before = self.residual[rows_R]
        improved = active_R & finite & (residual < before)
        best = torch.where(improved[:, None], value, self.best[rows_R])
        iterations = self.iterations[rows_R] + active_R
        reached = active_R & finite & (residual <= self.stopping.tolerance)
        ended = active_R & (reached | ~finite | (iterations >= self.stopping.max_iterations))
        state = pytree.tree_map(lambda leaf: leaf[rows_R], self.state)
        further, proposed = self.solver.update(z, fz_RD, state, f)
        goes_on = active_R & ~ended
        # torch.where, never arithmetic with the mask: a NaN in what is discarded must not spread
        self.z[rows_R] = torch.where(goes_on[:, None], further, torch.where(ended[:, None], best, z))
        self.best[rows_R] = best
        self.residual[rows_R] = torch.where(improved, residual, before)
        self.iterations[rows_R] = iterations
        self.converged[rows_R] |= reached
        self.done[rows_R] |= ended
        self._put_state(rows_R, proposed, goes_on)

    def _averaged(self, rows: Tensor, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        if self.averages is None or self.moving_average is None:
            return z, fz
        first = (self.iterations[rows] == 0)[:, None]
        found = []
        for whole, new in zip(self.averages, (z, fz), strict=True):
            average = torch.where(first, new, torch.lerp(whole[rows], new, self.moving_average))
            whole[rows] = average
            found.append(average)
        return found[0], found[1]

    def _residual(self, rows: Tensor, z: Tensor, fz: Tensor) -> Tensor:
        assert self.stopping is not None
        step = difference(z, fz)
        if self.stopping.norm == "absolute":
            return narrow(norm(step), self.residual.dtype).squeeze(1)
        residual, scale = relative_residual(step, fz, self.scale[rows, None], self.scale_limit)
        self.scale[rows] = scale.squeeze(1)
        return narrow(residual, self.residual.dtype).squeeze(1)

    @staticmethod
    def _put(whole: Tensor, rows_R: Tensor, values: Tensor | float, where_R: Tensor) -> None:
        # A mask rather than the rows it names, whose number would have to be read from the device.
        old = whole[rows_R]
        where = where_R.view(-1, *[1] * (old.ndim - 1))
        if not isinstance(values, Tensor):
            whole[rows_R] = old.masked_fill(where, values)
        else:
            whole[rows_R] = torch.where(where, values, old)

    def _put_state(self, rows_R: Tensor, values: Any, where_R: Tensor) -> None:
        for whole, part in zip(pytree.tree_leaves(self.state), pytree.tree_leaves(values), strict=True):
            self._put(whole, rows_R, part, where_R)
