"""The unrolled gradient: differentiate every step of the solver.

P. J. Werbos, "Backpropagation through time: what it does and how to do it", Proc. IEEE 78, 1990;
checkpointing: T. Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from implicit_blocks.gradients.diverged import replace_diverged, restore_diverged
from implicit_blocks.interfaces import GradientEstimator, Map, SearchLike
from implicit_blocks.search.loop import point_and_state, still_at_padding
from implicit_blocks.solution import Solution
from implicit_blocks.specs.base import require_count


class Unrolled(GradientEstimator):
    """Differentiate ``steps`` updates of the solver from the start, without stopping.

    Exact for the finite computation, second derivatives included. A model trained only in this way becomes a
    network of fixed depth: it need not have a fixed point, and further iterations may change its output. Use
    it to begin training, then an estimator that trains the fixed point.

    There is no search: windows and a moving average have no effect, and the stopping rule only decides
    whether the solution is reported as converged. Calls without gradients search, as with every estimator;
    their value differs unless the steps reach the fixed point. The option ``loops`` of a model takes as many
    undamped steps without gradients.

    Calls of ``f``: ``steps``. The reported residual is measured at the last of them. Rows that have diverged
    keep their start, without a gradient; the others are then unrolled once more without them, since the
    gradient of weights is a sum over rows.

    Args:
        steps: number of solver updates, at least 1.
        checkpointing: activation checkpointing: keep only ``z`` and the solver's state of each step, and
            recompute the rest in backward. This keeps the activations of one step instead of ``steps``, at
            the cost of one more call of ``f`` per step.

    Raises:
        ValueError: fewer than one step; called with a solver that is not differentiable, or a trajectory.

    """

    searches = False

    def __init__(self, *, steps: int = 4, checkpointing: bool = False) -> None:
        require_count("steps", steps)
        self.steps, self.checkpointing = steps, checkpointing

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Unroll the solver over whole rows."""
        solver = search.solver
        if not solver.differentiable:
            raise ValueError(
                f"the unrolled gradient differentiates the solver, but {type(solver).__name__} is not "
                "declared differentiable; use solver picard or gradient phantom"
            )
        if search.trajectory:
            raise ValueError(
                f"trajectory is {search.trajectory}, but the unrolled gradient keeps no iterates; leave it "
                "out, use gradient last_loops, or call without gradients"
            )
        z, report = self._unroll(f, z0, search, search.valid)
        if report.some_diverged():
            finite, rows = replace_diverged(f, z0, report)
            valid = None if search.valid is None else search.valid[rows]
            z = restore_diverged(self._unroll(finite, z0[rows], search, valid)[0], z0, report)
        return report.with_value(z)

    def _unroll(
        self, f: Map, z0: Tensor, search: SearchLike, valid: Tensor | None
    ) -> tuple[Tensor, Solution]:
        solver = search.solver

        def elements(z: Tensor) -> Tensor:
            return z.reshape(z0.shape[0], -1)

        def call(z_EF: Tensor) -> Tensor:
            z = z_EF.view(z0.shape)
            return elements(still_at_padding(f(z), z, valid))

        def step(z_EF: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
            fz_EF = call(z_EF)
            return fz_EF, *point_and_state(solver, solver.update(z_EF, fz_EF, state, call))

        z, state, calls = elements(z0), solver.init(elements(z0)), list[tuple[Tensor, Tensor]]()
        for _ in range(self.steps):
            before = z
            fz, z, state = (
                checkpoint(step, before, state, use_reentrant=False)
                if self.checkpointing
                else step(before, state)
            )
            calls = [*(calls if search.trace else ()), (before.view(z0.shape), fz.view(z0.shape))]
        reports = [search.report(point, value, iterations=self.steps) for point, value in calls]
        trace = torch.stack([report.finest_residual for report in reports]) if search.trace else None
        return z.view(z0.shape), replace(reports[-1], trace=trace)
