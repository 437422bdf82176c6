"""The gradient of reversible steps, in memory that does not grow with their number.

The steps are recorded for autograd without anything that they compute: in backward the last two points are
known, ``f`` of the earlier one is computed again, for its own gradient, and gives the point before.

Shape legend: B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from implicit_blocks import Adjoint, GradientEstimator, Map, SearchLike, Solution
from implicit_blocks.registry.contracts import ContractError, describe_component
from implicit_blocks_reversible.solver import step, undo
from implicit_blocks_reversible.spec import most_steps


class ReconstructionError(ContractError):
    """Steps could not be undone as exactly as asked for: their gradient would be of other points."""


class ReversibleGradient(GradientEstimator):
    """Take ``steps`` reversible steps, and differentiate them exactly without keeping what they passed.

    ``p_{m+1} = (1 − β) p_{m−1} + β f(p_m)`` (see ``implicit_blocks_reversible.solver``); the value is the
    last point. The gradient is that of these steps, unrolled, as far as they can be undone: points are kept
    in float64, the number of steps is bounded so that their rounding cannot grow beyond ``max_error``, and
    what is left after undoing all of them is compared with the start. The solution's ``adjoint.solution``
    reports it once backward has run: ``residual`` is the error of each row relative to its last point,
    ``iterations`` the steps undone. An error above ``max_error`` raises ``ReconstructionError`` out of
    backward.

    Memory holds one call's activations and four points, whatever the number of steps; time is that of
    checkpointing, one more call of ``f`` a step. ``f`` must return the same value for the same point. With
    ``search`` the steps begin at what the search found, as phantom steps do, for any number of them.

    Not for maps that are far from contracting, whose steps backwards lose digits faster (it is said, not
    hidden); nor for second derivatives, which backward refuses by a ``RuntimeError``.

    Calls of ``f``: the search's, if any, and ``steps``; in backward ``steps`` more.

    Args:
        steps: number of steps, at least 1.
        damping: β in (0, 1).
        search: search first, without gradients; else begin at the start.
        max_error: largest relative error of a row's undone start.

    Raises:
        ValueError: more steps than can be undone within ``max_error``.

    """

    def __init__(
        self, *, steps: int = 8, damping: float = 0.5, search: bool = True, max_error: float = 1e-4
    ) -> None:
        if not 0 < damping < 1:
            raise ValueError(f"damping is {damping}; choose a number in (0, 1)")
        if not 0 < max_error < 1:
            raise ValueError(f"max_error is {max_error}; choose a number in (0, 1)")
        most = most_steps(damping, max_error)
        if not 1 <= steps <= most:
            raise ValueError(
                f"steps is {steps}; with damping {damping} and max_error {max_error} choose from 1 to {most}"
            )
        self.steps, self.damping, self.search, self.max_error = steps, damping, search, max_error
        self.searches = search

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Search if asked to, then take the steps."""
        found = search(f, z0) if self.search else None
        start = z0 if found is None else found.z
        path = _Path(self, f, start, search.valid)
        previous = current = start.to(torch.float64)
        for m in range(self.steps):
            path.current = current
            # Nothing is handed over or captured but the path, so that no point is kept alive by the graph.
            # The call must run to its end when it is repeated: its value is what undoes the step.
            with set_checkpoint_early_stop(False):
                fz = checkpoint(path.call, m, use_reentrant=False)
            previous, current = current, step(previous, fz, self.damping)
        path.arrive(previous, current)
        value = current.to(start.dtype)
        if value.requires_grad:
            value.register_hook(_refuse_graph)
        if found is not None:
            return found.with_value(value, adjoint=path.adjoint)
        report = search.report(previous.detach().to(start.dtype), fz.detach(), iterations=self.steps)
        return report.with_value(value, adjoint=path.adjoint)


def _refuse_graph(gradient: Tensor) -> None:
    """Raise where backward records a graph: points that are undone are constants in it."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the reversible gradient has no second derivatives, and backward was called with "
            "create_graph=True; use the gradient Unrolled with checkpointing"
        )


def _fixed_at_padding(fz: Tensor, z: Tensor, valid_BL: Tensor | None) -> Tensor:
    """Return ``f(z)``, and ``z`` itself at padding, as the search does; both (B, L, …)."""
    if valid_BL is None:
        return fz
    return torch.where(valid_BL.view(*valid_BL.shape, *[1] * (z.ndim - 2)), fz, z)


class _Path:
    """The points of one pass: the current one on the way there, reconstructed ones on the way back."""

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
        """Keep the last two points, and no other."""
        self.ends = (before_last.detach(), last.detach())
        self.current = None

    def call(self, m: int) -> Tensor:
        """Return ``f(p_m)``, now or again."""
        again = self.current is None
        point = self._back_to(m) if self.current is None else self.current
        if again:  # what autograd saves must be the same again: with a start that needs no gradient, less
            point = point.requires_grad_(m > 0 or self.start_has_gradient)
        z = point.to(self.dtype)
        fz = _fixed_at_padding(self.f(z), z, self.valid)
        if again:
            self.called = (m, fz.detach())
            if m == 0:
                self._measure()
        return fz

    def _back_to(self, m: int) -> Tensor:
        """Return ``p_m``, undoing the steps behind it."""
        assert self.ends is not None
        if self.walked is None or self.walked[0] < m:  # a second backward through the same graph
            self.walked = (self.rule.steps - 1, *self.ends)
        while self.walked[0] > m:
            at, point, following = self.walked
            self.walked = (at - 1, undo(following, self._value(at, point), self.rule.damping), point)
        return self.walked[1].detach()

    def _value(self, m: int, point: Tensor) -> Tensor:
        """Return ``f(p_m)``: what backward has just computed, or where it passed by, computed now."""
        if self.called is not None and self.called[0] == m:
            return self.called[1]
        with torch.no_grad():
            z = point.to(self.dtype)
            return _fixed_at_padding(self.f(z), z, self.valid)

    def _measure(self) -> None:
        """Compare what is left of the start, ``p_0`` and ``p_{−1}``, with the start itself."""
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
                f"{describe_component(self.rule)} could not undo its {self.rule.steps} steps: it missed the "
                "start by "
                f"{worst:.1e} of the value, more than max_error {self.rule.max_error:.1e}; take fewer steps, "
                "a smaller damping, or the unrolled gradient with checkpointing, and see that the map "
                "returns the same value each time"
            )
