"""Truncated backpropagation through the last loops of a fixed number of loops.

R. J. Williams and J. Peng, "An efficient gradient-based algorithm for on-line training of recurrent network
trajectories", Neural Computation 2, 1990; for looped language models: J. Geiping et al., "Scaling up
Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach", 2025.

Shape legend: B batch, L tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from implicit_blocks.gradients.diverged import replace_diverged, restore_diverged
from implicit_blocks.interfaces import GradientEstimator, Map, SearchLike
from implicit_blocks.search.agreement import Agreement, fixed_budget
from implicit_blocks.search.loops import LoopCounts, run_loops
from implicit_blocks.solution import Solution
from implicit_blocks.specs.base import require_count


class LastLoops(GradientEstimator):
    """Apply ``f`` n times, undamped, and differentiate the last k of these loops.

    ``z_{t+1} = f(z_t)`` for t < n, with ``z_{n−k}`` a constant. The number n is ``search.loops``, which may
    differ per row or token, or else ``search.stopping.max_iterations``; k is the smaller of n and ``loops``,
    unless ``search.loops.differentiated`` is given. With ``loops=None`` all loops are differentiated, and the
    gradient is exact for the finite computation. With fewer it is biased: at a fixed point it is the first k
    terms of the Neumann series of ``(I − ∂f/∂z)^{-1}``. All else that ``f`` depends on keeps its gradient
    through the k loops.

    There is no search: the solver, windows and a moving average have no effect, and the stopping rule only
    decides whether the solution is reported as converged. The residual is that of the last loop. Do not use
    it without ``residual_weight`` to train a model that is evaluated at its fixed point: nothing then
    requires that the loops converge.

    With ``residual_weight`` w the solution has a penalty per row, the mean over its tokens of
    ``w · ‖z_n − z_{n−1}‖² / ‖z_n‖²``, which shortens later searches. It costs no call of ``f``.

    Calls of ``f``: n, or with numbers per row the largest number without gradients and the largest number
    with them; k of them are differentiated. A ``SteppingMap`` takes k − 1 of them in one call of
    ``damped_steps`` where all rows have the same numbers. Rows that have diverged keep their start, without a
    gradient; the others are then computed once more without them, since the gradient of weights is a sum over
    rows. Processes that call ``f`` equally often do so together, or with ``fixed_budget`` not at all.

    Args:
        loops: k, at least 1; None: all loops.
        residual_weight: w, 0 or above; 0: no penalty.

    Raises:
        ValueError: fewer than one loop, or a negative weight.

    """

    searches = False

    def __init__(self, *, loops: int | None = None, residual_weight: float = 0.0) -> None:
        if loops is not None:
            require_count("loops", loops)
        if not 0 <= residual_weight < math.inf:
            raise ValueError(f"residual_weight must be 0 or above, got {residual_weight!r}")
        self.loops, self.residual_weight = loops, float(residual_weight)

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Take the loops."""
        counts = search.loops if search.loops is not None else LoopCounts(search.stopping.max_iterations)
        solution = self._take(f, z0, search, counts, search.valid)
        if _repeats(solution, search.agree):
            finite, rows = replace_diverged(f, z0, solution)
            valid = None if search.valid is None else search.valid[rows]
            again = self._take(finite, z0[rows], search, counts.select_rows(rows), valid)
            solution = replace(
                solution,
                z=restore_diverged(again.z, z0, solution),
                penalty=None if again.penalty is None else again.penalty.masked_fill(solution.diverged, 0.0),
                trajectory={
                    t: restore_diverged(z, z0, solution) for t, z in (again.trajectory or {}).items()
                },
            )
        return solution if search.trajectory else replace(solution, trajectory=None)

    def _take(
        self, f: Map, z0: Tensor, search: SearchLike, counts: LoopCounts, valid: Tensor | None
    ) -> Solution:
        looped = run_loops(
            f,
            z0,
            counts,
            last=self.loops,
            valid=valid,
            trajectory=search.trajectory,
            agree=search.agree,
            report=search.report if search.trace else None,
        )
        report = search.report(looped.before, looped.z, iterations=counts.total)
        penalty = self.penalty(looped.before, looped.z, valid=valid)
        return replace(report, z=looped.z, trace=looped.trace, trajectory=looped.trajectory, penalty=penalty)

    def penalty(self, before: Tensor, z: Tensor, *, valid: Tensor | None) -> Tensor | None:
        """Return the penalty of each row, (B,), given the last loop's point and value; None: no penalty."""
        if not self.residual_weight or not torch.is_grad_enabled():
            return None
        return self.residual_weight * relative_change(before, z, valid=valid)


def relative_change(before: Tensor, z: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return ``‖z − before‖² / ‖z‖²`` of each row, (B,) float32; of points (B, L, D) its mean over tokens.

    Args:
        before: the point of which ``z`` is the value, (B, …).
        z: the value, (B, …).
        valid: (B, L) bool, False at padding, which is left out.

    """
    tokens = z.shape[:2] if z.ndim > 2 else z.shape[:1]
    value, change = z.float().reshape(*tokens, -1), (z.float() - before.float()).reshape(*tokens, -1)
    ratio = change.square().sum(-1) / value.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    if ratio.ndim == 1:
        return ratio
    if valid is None:
        return ratio.mean(1)
    return torch.where(valid, ratio, 0.0).sum(1) / valid.sum(1).clamp(min=1)


def _repeats(solution: Solution, agree: Agreement | None) -> bool:
    """Whether to take the loops again without the rows that have diverged, on this or any other process."""
    if agree is fixed_budget:  # no process knows whether rows of another one have diverged
        return False
    some = solution.some_diverged()
    return some if agree is None else not agree(not some)
