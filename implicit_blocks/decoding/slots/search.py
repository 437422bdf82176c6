"""The searches of decoding slots: single tokens that begin whenever the token before them is done.

The iterates, the rule and the report are those of ``implicit_blocks.search``, whose tokens begin together.

Shape legend: S slots, R of them in a step, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.cuda.procedures import put_
from implicit_blocks.exits.exit import Exit, begin, effective, measured
from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.search.policies import MovingAverage
from implicit_blocks.search.state import Status, StatusRule, initial_scale, tolerance_of
from implicit_blocks.solution import SMALLEST_SCALE, finite_or
from implicit_blocks.specs import Stopping


class SlotSearch:
    """One search per slot.

    ``z`` (S, D) is the point of each slot's next call of the map; once a slot is ``done``, (S,) bool, it is
    the solution. ``iterations`` int64, ``residual`` and ``converged``, (S,), report as a ``Solution`` does.

    Args:
        solver: the update rule; None: there is no search, and the solution is every start, or what
            ``iterate`` makes of it.
        stopping: tolerance, iterations, norm.
        slots: S.
        width: D.
        moving_average: α of an average over the iterates, or None.
        exit: the exit criterion whose measures decide, whose predictions are functions of single points;
            None: the residual.

    Raises:
        ValueError: the exit criterion does not fit the stopping rule.

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
        exit: Exit | None = None,
    ) -> None:
        self.solver, self.stopping, self.exit = solver, stopping, exit
        if exit is not None and stopping is not None:
            self.exit = effective(exit, stopping)
        self.z = torch.zeros(slots, width, device=device, dtype=dtype)
        self.best = torch.zeros_like(self.z)
        precision = torch.promote_types(dtype, torch.float32)
        self.residual = torch.zeros(slots, device=device, dtype=precision)
        self.scale, scale_limit = initial_scale(self.z, (slots,))
        self.rule: StatusRule | None = None
        if stopping is not None:
            tolerance = tolerance_of(stopping, self.exit)
            self.rule = StatusRule(tolerance, stopping.norm == "relative", scale_limit)
        self.iterations = torch.zeros(slots, device=device, dtype=torch.int64)
        self.limits: tuple[Tensor, Tensor] | None = None
        """Each slot's tolerance and maximum number of iterations, (S,); None: residuals end no search."""
        self.limits_on_host: dict[int, tuple[float, int]] = {}  # by slot
        if solver is not None and stopping is not None and self.exit is None:
            tolerance_S = torch.full_like(self.residual, stopping.tolerance)
            self.limits = tolerance_S, torch.full_like(self.iterations, stopping.max_iterations)
            self.limits_on_host = dict.fromkeys(range(slots), (stopping.tolerance, stopping.max_iterations))
        self.converged = torch.zeros(slots, device=device, dtype=torch.bool)
        self.done = torch.zeros_like(self.converged)
        self.state: Any = () if solver is None else pytree.tree_map(torch.clone, solver.init(self.z))
        # What the criterion has measured; without one, the residuals are the measures.
        self.measure = self.residual if self.exit is None else torch.zeros_like(self.residual)
        self.exit_state: Any = ()
        if self.exit is not None:
            self.exit_state = pytree.tree_map(torch.clone, begin(self.exit, self.z))
        self.averaging = None if moving_average is None else MovingAverage(moving_average)
        self.averages = None if moving_average is None else (self.z.clone(), self.z.clone())

    def set_limits(self, slots: Sequence[int], tolerance: float, max_iterations: int) -> None:
        """Set the tolerance and the maximum number of iterations of the next searches of some slots."""
        assert self.limits is not None
        limits = tolerance, max_iterations
        if all(self.limits_on_host[slot] == limits for slot in slots):
            return
        slots_B = torch.empty(len(slots), dtype=torch.int64, device=self.z.device)
        put_(slots_B, slots)
        for whole_S, value in zip(self.limits, limits, strict=True):
            whole_S.index_fill_(0, slots_B, value)
        self.limits_on_host |= dict.fromkeys(slots, limits)

    def begin(self, slots_R: Tensor, start_RD: Tensor, where_R: Tensor | None = None) -> None:
        """Begin a token in each of these slots, or in those of them where ``where_R`` (R,) bool is True."""
        where = torch.ones_like(slots_R, dtype=torch.bool) if where_R is None else where_R
        start = start_RD.to(self.z.dtype)
        self._put(self.z, slots_R, start, where)
        self._put(self.best, slots_R, start, where)
        self._put(self.residual, slots_R, torch.inf, where)
        if self.exit is not None:
            self._put(self.measure, slots_R, torch.inf, where)
            self._put_state(self.exit_state, slots_R, self.exit.init(start), where)
        self._put(self.scale, slots_R, SMALLEST_SCALE, where)
        self._put(self.iterations, slots_R, 0, where)
        self._put(self.converged, slots_R, False, where)
        self._put(self.done, slots_R, self.solver is None, where)
        if self.solver is not None:
            self._put_state(self.state, slots_R, self.solver.init(start), where)

    def take(self, rows_R: Tensor, fz_RD: Tensor, active_R: Tensor, f: Map) -> None:
        """Update these slots by the map's values at their ``z``.

        ``active_R`` (R,) bool selects those that search. ``f`` is the map of the same slots, for solvers that
        call it themselves.
        """
        assert self.solver is not None
        assert self.stopping is not None
        assert self.rule is not None
        rule = self.rule
        max_iterations: int | Tensor = self.stopping.max_iterations
        if self.limits is not None:
            tolerance, max_iterations = (limit[rows_R, None] for limit in self.limits)
            rule = replace(rule, tolerance=tolerance)
        z, active = self.z[rows_R], active_R[:, None]
        point, value = self._average(rows_R, z, fz_RD)
        residual, status = rule.residuals(self._status(rows_R, active), point, value)
        self.scale[rows_R] = status.scale.squeeze(1)
        measure = self._measure(rows_R, point, value, residual)
        status, improved, _ = rule.update(status, residual, measure=measure)
        best = torch.where(improved, value, self.best[rows_R])
        goes_on = active & status.active & (status.iterations < max_iterations)
        ended = active & ~goes_on
        state = pytree.tree_map(lambda leaf: leaf[rows_R], self.state)
        further, proposed = self.solver.update(z, fz_RD, state, f)
        # torch.where, never arithmetic with the mask: a NaN in what is discarded must not spread
        self.z[rows_R] = torch.where(goes_on, further, torch.where(ended, best, z))
        self.best[rows_R] = best
        self.residual[rows_R] = status.token_residual.squeeze(1)
        if measure is not None:
            self.measure[rows_R] = status.lowest_residual.squeeze(1)
        self.iterations[rows_R] = status.iterations.squeeze(1)
        self.converged[rows_R] |= (ended & (status.lowest_residual <= rule.tolerance)).squeeze(1)
        self.done[rows_R] |= ended.squeeze(1)
        self._put_state(self.state, rows_R, proposed, goes_on.squeeze(1))

    def iterate(self, rows_R: Tensor, f: Map, calls: int) -> None:
        """Take this number of undamped iterations from the start of each of these slots.

        A value that is not finite is replaced by the point before it.
        """
        z_RD = self.z[rows_R]
        for _ in range(calls):
            z_RD = finite_or(f(z_RD), z_RD)
        self.z[rows_R] = z_RD

    def report(self, rows_R: Tensor, fz_RD: Tensor, calls: int) -> None:
        """Report the last of this number of iterations, given the map's values at the slots' ``z``."""
        assert self.rule is not None
        status = self._status(rows_R, self.done[rows_R, None])
        residual = self.rule.residuals(status, self.z[rows_R], fz_RD)[0].squeeze(1)
        self.residual[rows_R], self.converged[rows_R] = residual, residual <= self.rule.tolerance
        self.iterations.index_fill_(0, rows_R, calls)

    def _status(self, rows_R: Tensor, active: Tensor) -> Status:
        """Return the status of slots as a search's; an inactive slot keeps its lowest residual."""
        lowest, iterations = self.measure[rows_R, None], self.iterations[rows_R, None]
        residual = lowest if self.exit is None else self.residual[rows_R, None]
        return Status(lowest, lowest, residual, iterations, active, self.scale[rows_R, None])

    def _measure(self, rows: Tensor, point: Tensor, value: Tensor, residual: Tensor) -> Tensor | None:
        """Return the measures of slots, and update their criterion's state; None without a criterion.

        The state of a slot that does not search is set again when its next token begins.
        """
        if self.exit is None:
            return None
        before = pytree.tree_map(lambda leaf: leaf[rows], self.exit_state)
        measure, after = measured(self.exit, point, value, residual, before)
        for whole, part in zip(pytree.tree_leaves(self.exit_state), pytree.tree_leaves(after), strict=True):
            whole[rows] = part
        return measure

    def _average(self, rows: Tensor, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        if self.averages is None or self.averaging is None:
            return z, fz
        first = (self.iterations[rows] == 0)[:, None]
        before = self.averages[0][rows], self.averages[1][rows]
        updated = self.averaging.update(before, z, fz)
        point, value = (torch.where(first, new, mean) for new, mean in zip((z, fz), updated, strict=True))
        self.averages[0][rows], self.averages[1][rows] = point, value
        return point, value

    @staticmethod
    def _put(whole: Tensor, rows_R: Tensor, values: Tensor | float, where_R: Tensor) -> None:
        # By a mask, because the number of rows that it selects would have to be read from the device.
        old = whole[rows_R]
        where = where_R.view(-1, *[1] * (old.ndim - 1))
        if not isinstance(values, Tensor):
            whole[rows_R] = old.masked_fill(where, values)
        else:
            whole[rows_R] = torch.where(where, values, old)

    def _put_state(self, state: Any, rows_R: Tensor, values: Any, where_R: Tensor) -> None:
        for whole, part in zip(pytree.tree_leaves(state), pytree.tree_leaves(values), strict=True):
            self._put(whole, rows_R, part, where_R)
