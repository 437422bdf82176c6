"""The gradient of reversible steps, with memory independent of their number.

Autograd saves no activations of the steps: backward starts from the last two points, recomputes ``f`` at the
earlier one for its gradient, and reconstructs the point before from its value.

Shape legend: B batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from implicit_blocks import Adjoint, GradientEstimator, Map, SearchLike, Solution
from implicit_blocks.registry.contracts import ContractError, describe_component
from implicit_blocks_reversible.solver import step, undo
from implicit_blocks_reversible.spec import most_steps


class ReconstructionError(ContractError):
    """Steps cannot be undone accurately enough: their gradient would belong to other points."""


class ReversibleGradient(GradientEstimator):
    """Take ``steps`` reversible steps and differentiate them exactly without storing their activations.

    ``p_{m+1} = (1 − β) p_{m−1} + β f(p_m)`` (see ``implicit_blocks_reversible.solver``); the value is the
    last point. The gradient is that of the unrolled steps, up to the error of undoing them: points are stored
    in float64, the number of steps is bounded so that rounding cannot grow beyond ``max_error``, and the
    result of undoing all steps is compared with the start. After backward, ``adjoint.solution`` of the
    solution reports the result: ``residual`` is the error of each row relative to its last point,
    ``iterations`` the number of steps undone. If an error exceeds ``max_error``, backward raises
    ``ReconstructionError``.

    Memory holds the activations of one call and four points, for any number of steps; the time is that of
    activation checkpointing, one more call of ``f`` per step. ``f`` must be deterministic. With ``search``
    the steps start from the result of a search, like phantom steps.

    Do not use it for maps that are far from contracting, whose inverse steps lose accuracy faster (this is
    detected), nor for second derivatives, for which backward raises a ``RuntimeError``.

    Calls of ``f``: those of the search, if any, plus ``steps``; in backward ``steps`` more.

    Args:
        steps: number of steps, at least 1.
        damping: β in (0, 1).
        search: search first, without gradients; otherwise begin at the start.
        max_error: maximum relative error of a row's reconstructed start.

    Raises:
        ValueError: more steps than can be undone within ``max_error``; called without a search for a
            trajectory.

    """

    def __init__(
        self, *, steps: int = 8, damping: float = 0.5, search: bool = True, max_error: float = 1e-4
    ) -> None:
        if not 0 < damping < 1:
            raise ValueError(f"damping must be in (0, 1), got {damping}")
        if not 0 < max_error < 1:
            raise ValueError(f"max_error must be in (0, 1), got {max_error}")
        most = most_steps(damping, max_error)
        if not 1 <= steps <= most:
            raise ValueError(
                f"steps must be from 1 to {most} for damping {damping}, max_error {max_error}; got {steps}"
            )
        self.steps, self.damping, self.search, self.max_error = steps, damping, search, max_error
        self.searches = search

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Search if requested, then take the steps."""
        if search.trajectory and not self.search:
            raise ValueError(
                f"trajectory is {search.trajectory}, but the reversible gradient keeps no iterates; leave it "
                "out, or use search: true for those of the search"
            )
        found = search(f, z0) if self.search else None
        start = z0 if found is None else found.z
        path = _Path(self, f, start, search.valid)
        previous = current = start.to(torch.float64)
        trace: list[Tensor] = []
        for m in range(self.steps):
            path.current = current
            # The checkpoint captures only the path, so that the graph keeps no point alive.
            # The recomputation must run to its end: its value is needed to undo the step.
            with set_checkpoint_early_stop(False):
                fz = checkpoint(path.call, m, use_reentrant=False)
            previous, current = current, step(previous, fz, self.damping)
            if found is None and (search.trace or m == self.steps - 1):
                point = previous.detach().to(start.dtype)
                report = search.report(point, fz.detach(), iterations=self.steps)
                trace.append(report.finest_residual)
        path.arrive(previous, current)
        value = current.to(start.dtype)
        if value.requires_grad:
            value.register_hook(_refuse_graph)
        if found is None:
            found = replace(report, trace=torch.stack(trace) if search.trace else None)
        return found.with_value(value, adjoint=path.adjoint)


def _refuse_graph(gradient: Tensor) -> None:
    """Raise an error if backward records a graph, in which reconstructed points would be constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the reversible gradient has no second derivatives, but backward was called with "
            "create_graph=True; use the gradient Unrolled with checkpointing"
        )


def _fixed_at_padding(fz: Tensor, z: Tensor, valid_BL: Tensor | None) -> Tensor:
    """Return ``f(z)``, and ``z`` itself at padding, as the search does; both (B, L, …)."""
    if valid_BL is None:
        return fz
    return torch.where(valid_BL.view(*valid_BL.shape, *[1] * (z.ndim - 2)), fz, z)


class _Path:
    """The points of one pass: the current point in forward, reconstructed points in backward."""

    def __init__(self, rule: ReversibleGradient, f: Map, start: Tensor, valid: Tensor | None) -> None:
        self.rule, self.f, self.valid = rule, f, valid
        self.dtype, self.start = start.dtype, start.detach()
        self.adjoint = Adjoint()
        self.current: Tensor | None = None
        self.start_has_gradient = start.requires_grad
        self.ends: tuple[Tensor, Tensor] | None = None
        self.walked: tuple[int, Tensor, Tensor] | None = None  # m, p_m and p_{m+1}
        self.called: tuple[int, Tensor] | None = None  # m and f(p_m)

    def arrive(self, before_last: Tensor, last: Tensor) -> None:
        """Store the last two points and no other."""
        self.ends = (before_last.detach(), last.detach())
        self.current = None

    def call(self, m: int) -> Tensor:
        """Return ``f(p_m)``, in forward or in recomputation."""
        again = self.current is None
        point = self._back_to(m) if self.current is None else self.current
        if again:  # autograd must save the same tensors again, fewer if the start needs no gradient
            point = point.requires_grad_(m > 0 or self.start_has_gradient)
        z = point.to(self.dtype)
        fz = _fixed_at_padding(self.f(z), z, self.valid)
        if again:
            self.called = (m, fz.detach())
            if m == 0:
                self._measure()
        return fz

    def _back_to(self, m: int) -> Tensor:
        """Return ``p_m`` by undoing the steps after it."""
        assert self.ends is not None
        if self.walked is None or self.walked[0] < m:  # a second backward through the same graph
            self.walked = (self.rule.steps - 1, *self.ends)
        while self.walked[0] > m:
            at, point, following = self.walked
            self.walked = (at - 1, undo(following, self._value(at, point), self.rule.damping), point)
        return self.walked[1].detach()

    def _value(self, m: int, point: Tensor) -> Tensor:
        """Return ``f(p_m)``: the value that backward has just computed, or a new one."""
        if self.called is not None and self.called[0] == m:
            return self.called[1]
        with torch.no_grad():
            z = point.to(self.dtype)
            return _fixed_at_padding(self.f(z), z, self.valid)

    def _measure(self) -> None:
        """Compare the reconstructed start, ``p_0`` and ``p_{−1}``, with the start."""
        assert self.walked is not None
        assert self.called is not None
        assert self.ends is not None
        _, first, second = self.walked
        before = undo(second, self.called[1], self.rule.damping)
        self.walked = self.called = None

        def norm_B(x: Tensor) -> Tensor:
            norm: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
            return norm

        start = self.start.to(torch.float64)
        size = torch.maximum(norm_B(self.ends[1]), norm_B(start)).clamp(min=torch.finfo(torch.float32).tiny)
        error = torch.maximum(norm_B(first - start), norm_B(before - start)) / size
        finite = error.isfinite()
        self.adjoint.add(
            Solution(
                z=first,
                iterations=torch.full_like(error, self.rule.steps, dtype=torch.int64),
                residual=error,
                converged=error <= self.rule.max_error,
                diverged=~finite,
            )
        )
        worst = float(error.nan_to_num(nan=torch.inf).max())
        if worst > self.rule.max_error:
            raise ReconstructionError(
                f"{describe_component(self.rule)} could not undo its {self.rule.steps} steps: the relative "
                f"error of the start is {worst:.1e}, more than max_error {self.rule.max_error:.1e}; take "
                "fewer steps, a smaller damping, or the unrolled gradient with checkpointing, and check "
                "that the map is deterministic"
            )
