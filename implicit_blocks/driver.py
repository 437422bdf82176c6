"""The loop: call ``f``, measure, stop, freeze, keep the best, drop what is done.

One driver serves every solver. A solver proposes the next point; everything else, and the report, is here.

Shape legend: B batch, L tokens of a row, E elements (B rows, or B · L tokens with prefix scope), F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.handed_back import check_next_point, check_solver_state
from implicit_blocks.interfaces import Map, RowMap, Solution, Solver
from implicit_blocks.ops.accelerated import available
from implicit_blocks.specs import Stopping
from implicit_blocks.stopping import Agreement

RELATIVE_FLOOR = 1e-9  # keeps the relative residual finite at f(z) = 0, as in the published rule


@dataclass
class Search:
    """A solver with its stopping rule: calling it finds ``z = f(z)`` and says how that went.

    Args:
        solver: the update rule.
        stopping: tolerance, iterations, norm, and scope. With scope ``sequence`` an element is a row of the
            batch; with ``prefix`` it is a token, ``z`` is (B, L, …) and ``f`` must be causal in L: a token
            freezes once its own residual and those of all tokens before it are under the tolerance, so that
            its value depends on no later token.
        valid: (B, L) bool, False at padding, which stands still at its start and counts in no norm: neither
            the stopping rule nor the solver sees it move.
        trace: keep the residual of every call.
        agree: asked once an iteration whether the loop may end, where processes must call ``f`` equally often
            (``implicit_blocks.stopping``); None: it ends when this process's rows are done.
        moving_average: α in (0, 1], or None. The search then answers with an average of its iterates, for
            maps that are noisy: ``m ← (1 − α) m + α f(z)`` takes the place of ``f(z)`` in all that follows,
            and the same average of the points, ``z̄``, that of ``z``; both begin with the first iterate. The
            solver goes on from ``z`` and ``f(z)`` themselves.
        compact: let rows that are done leave the batch, where ``f`` offers ``select_rows``. Rows that go on
            may differ in the last digits from a run without, as matrix products of another size do.

    An *iteration* is one call of ``f``. The residual is that of the undamped map, ``‖f(z) − z‖`` in the norm
    of the element, divided by ``‖f(z)‖ + 1e-9`` with a relative norm, in float32 or better; padding is left
    out. The returned value of an element is the ``f(z)`` whose residual was lowest; with prefix scope
    "residual" means there the largest among the token and those before it, so that an element that converged
    returns the value it converged with. An element whose ``f(z)`` is not finite (or so large that its norm is
    not) has *diverged*: it leaves the loop with the best value it had. With prefix scope the tokens behind it
    leave too, since they can no longer converge.

    """

    solver: Solver
    stopping: Stopping
    valid: Tensor | None = None
    trace: bool = False
    moving_average: float | None = None
    compact: bool = True
    agree: Agreement | None = None

    def __call__(self, f: Map, z0: Tensor) -> Solution:
        """Search from ``z0`` (B, …), without gradients; at most ``max_iterations`` calls of ``f``."""
        self._check(z0)
        with torch.no_grad():
            return _Loop(self, f, z0.detach()).run()

    def ends(self, done: bool) -> bool:
        """Whether the loop may end, given whether this process's rows are done."""
        return done if self.agree is None else self.agree(done)

    def report(self, z: Tensor, fz: Tensor, *, iterations: int) -> Solution:
        """Return a solution with the value ``z``, given ``f(z)``, both (B, …), measured as a search does."""
        self._check(z)
        with torch.no_grad():
            loop = _Loop(self, lambda z: z, z.detach())
            residual = loop.residuals(loop.elements(z.detach()), loop.elements(fz.detach()))
            diverged = ~residual.isfinite()
            measured = loop.prefix_largest(residual.masked_fill(diverged, torch.inf))
            loop.own_residual = residual
            loop.iterations.fill_(iterations)
            loop.converged, loop.diverged = measured <= self.stopping.tolerance, diverged
            return loop.solution(z)

    def _check(self, z0: Tensor) -> None:
        if z0.ndim < 2 or not z0.numel():
            raise ValueError(
                f"z0 has shape {tuple(z0.shape)}; a search needs the batch and at least one more dimension, "
                "none of them 0"
            )
        if not z0.is_floating_point():
            raise ValueError(f"z0 is {z0.dtype}; a search needs floating-point numbers")
        if self.stopping.scope == "prefix" and z0.ndim < 3:
            raise ValueError(
                f"scope 'prefix' freezes tokens of (batch, tokens, …), but z0 has shape {tuple(z0.shape)}; "
                "use scope 'sequence'"
            )
        if self.valid is not None and self.valid.shape != z0.shape[:2]:
            raise ValueError(
                f"valid has shape {tuple(self.valid.shape)}, z0 starts with {tuple(z0.shape[:2])}; "
                "give one flag a token"
            )


def still_at_padding(fz: Tensor, z: Tensor, valid_BL: Tensor | None) -> Tensor:
    """Return ``f(z)``, and ``z`` itself at padding; both (B, L, …).

    A solver that mixes whole rows, as Anderson does, would weigh what happens there.
    """
    if valid_BL is None:
        return fz
    return torch.where(valid_BL.view(*valid_BL.shape, *[1] * (z.ndim - 2)), fz, z)


class _Loop:
    """One run of a search: the working set of rows, and what is known of each element."""

    def __init__(self, search: Search, f: Map, z0: Tensor) -> None:
        self.search, self.stopping, self.solver, self.f = search, search.stopping, search.solver, f
        self.shape = z0.shape
        self.tokens = z0.shape[1] if self.stopping.scope == "prefix" else 1
        self.valid = search.valid
        self.z = self.elements(z0)
        self.best = self.z
        self.fused = z0.is_cuda and z0.dtype != torch.float64 and self.valid is None and available("triton")
        count = (self.z.shape[0],)
        precision = torch.promote_types(z0.dtype, torch.float32)
        # The lowest so far; with prefix scope of the token and those before it.
        self.measured = z0.new_full(count, torch.inf, dtype=precision)
        self.own_residual = self.measured
        self.iterations = z0.new_zeros(count, dtype=torch.int64)
        self.converged = z0.new_zeros(count, dtype=torch.bool)
        self.diverged = self.converged
        self.trace: list[Tensor] = []
        self.averages: tuple[Tensor, Tensor] | None = None  # of z and of f(z), where they are asked for
        if self.tokens > 1 and self.valid is not None:
            self.converged = ~self.valid.reshape(-1)
            self.own_residual = self.own_residual.masked_fill(self.converged, 0.0)

    # ------------------------------------------------------------------------------------ layout

    def elements(self, z: Tensor) -> Tensor:
        """Lay (B, L, …) out as elements, (E, F)."""
        return z.reshape(z.shape[0] * self.tokens, -1)

    def call(self, z: Tensor) -> Tensor:
        """Call the map on elements, (E, F)."""
        whole = z.view(z.shape[0] // self.tokens, *self.shape[1:])
        return self.elements(still_at_padding(self.f(whole), whole, self.valid))

    def prefix_largest(self, residual: Tensor) -> Tensor:
        """With prefix scope, the largest residual among each token and those before it."""
        if self.tokens == 1:
            return residual
        return residual.view(-1, self.tokens).cummax(1).values.reshape(-1)

    def residuals(self, z: Tensor, fz: Tensor) -> Tensor:
        """Return each element's residual, (E,), in float32 or better."""
        if self.fused and z.is_contiguous() and fz.is_contiguous():
            from implicit_blocks.ops.kernels.residual import squared_norms

            step, size = (square.sqrt_() for square in squared_norms(z, fz))
            return step if self.stopping.norm == "absolute" else step / (size + RELATIVE_FLOOR)
        difference, value = fz - z, fz
        if self.valid is not None:
            if self.tokens > 1:
                difference = difference.masked_fill(~self.valid.reshape(-1, 1), 0.0)
            else:
                padding = ~self.valid.view(*self.valid.shape, *[1] * (len(self.shape) - 2))
                shape = (-1, *self.shape[1:])
                difference = difference.view(shape).masked_fill(padding, 0.0).flatten(1)
                value = fz.view(shape).masked_fill(padding, 0.0).flatten(1)
        precision = self.measured.dtype
        norm: Tensor = torch.linalg.vector_norm(difference, dim=1, dtype=precision)
        if self.stopping.norm == "absolute":
            return norm
        whole: Tensor = torch.linalg.vector_norm(value, dim=1, dtype=precision)
        return norm / (whole + RELATIVE_FLOOR)

    # ------------------------------------------------------------------------------------ the loop

    def run(self) -> Solution:
        results: _Results | None = None
        active = ~self.converged
        state = self.solver.init(self.z)
        check_solver_state(self.solver, state, self.z.shape[0])
        for iteration in range(1, self.stopping.max_iterations + 1):
            fz = self.call(self.z)
            measured, value = self.averaged(self.z, fz)
            active, improved = self.measure(measured, value, active)
            if iteration == self.stopping.max_iterations:  # nothing is decided any more: the host goes on
                self.best = torch.where(improved[:, None], value, self.best)
                break
            rows_active = active.view(-1, self.tokens).any(1)
            remaining, better, rows = self.counts(active, improved, rows_active)
            # torch.where, never arithmetic with the mask: a NaN in what is discarded must not spread
            every = better == active.numel()
            self.best = value if every else torch.where(improved[:, None], value, self.best)
            if self.search.ends(remaining == 0):
                break
            z, proposed = self.solver.update(self.z, fz, state, self.call)
            check_next_point(self.solver, z, self.z)
            if iteration == 1:
                check_solver_state(self.solver, proposed, self.z.shape[0])
            if remaining < active.numel():
                z = torch.where(active[:, None], z, self.best)
                state = _where(active, proposed, state)
            else:
                state = proposed
            self.z = z
            if self.search.compact and self.can_drop(rows, rows_active.numel()):
                results = results or _Results(self)
                state, active = self.drop(results, rows_active, rows, state, active)
        if results is not None:
            results.write(self)
            results.restore(self)
        return self.solution(self.best.view(self.shape))

    def counts(self, *flags: Tensor) -> list[int]:
        """Return how many of each are set: the loop's one reading from the device in an iteration."""
        counts = torch.stack([flag.sum() for flag in flags])
        if not counts.is_cuda:
            return counts.tolist()
        # A copy and an event rather than tolist, which would wait for whatever else the device is given.
        here = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        here.copy_(counts, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        arrived.synchronize()
        return here.tolist()

    def averaged(self, z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
        """Return what stands for ``z`` and ``f(z)`` in the report: their moving averages, or they.

        Averages of both, rather than the step of one: that step is smaller than the residual by the factor α,
        and would pass for convergence where there is none.
        """
        if self.search.moving_average is None:
            return z, fz
        if self.averages is not None:
            weight = self.search.moving_average
            z, fz = (torch.lerp(old, new, weight) for old, new in zip(self.averages, (z, fz), strict=True))
        self.averages = z, fz
        return z, fz

    def measure(self, z: Tensor, fz: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Take in what ``f`` returned; return which elements go on, and which are better now, (E,) bool."""
        residual = self.residuals(z, fz)
        finite = residual.isfinite()
        if self.tokens == 1:
            measured = residual.masked_fill(~finite, torch.inf)
        else:
            left = torch.where(self.converged, 0.0, torch.inf).to(residual.dtype)
            measured = self.prefix_largest(torch.where(active & finite, residual, left))
        improved = active & (measured < self.measured)
        self.measured = torch.where(improved, measured, self.measured)
        self.own_residual = torch.where(improved, residual, self.own_residual)
        self.iterations = self.iterations + active
        reached = active & (measured <= self.stopping.tolerance)
        self.converged = self.converged | reached
        self.diverged = self.diverged | (active & ~finite)
        if self.search.trace:
            self.trace.append(residual.masked_fill(~active, torch.nan))
        active = active & finite & ~reached
        if self.tokens > 1:
            behind = self.diverged.view(-1, self.tokens).cummax(1).values.reshape(-1)
            active = active & ~behind
        return active, improved

    def can_drop(self, count: int, rows: int) -> bool:
        """Whether it pays to go on with ``count`` of so many rows: the half or fewer."""
        fewest = max(count, self.shape[0] // 8) if self.z.is_cuda else count
        return count > 0 and 2 * fewest <= rows and isinstance(self.f, RowMap)

    def drop(
        self, results: _Results, rows: Tensor, count: int, state: Any, active: Tensor
    ) -> tuple[Any, Tensor]:
        """Let rows that are done leave the working set; ``rows`` (B,) bool says which ``count`` go on."""
        results.write(self)
        if self.z.is_cuda:
            # Four sizes of batch, for compiled kernels and recorded graphs: rows that are done fill up.
            size = rows.numel()
            while size // 2 >= max(count, self.shape[0] // 8):
                size //= 2
            index = torch.argsort((~rows).to(torch.uint8), stable=True)[:size].sort().values
        else:
            index = rows.nonzero().squeeze(1)
        results.rows = results.rows[index]
        tokens = torch.arange(self.tokens, device=index.device)
        kept = (index[:, None] * self.tokens + tokens).reshape(-1)
        assert isinstance(self.f, RowMap)
        self.f = self.f.select_rows(index)
        self.valid = None if self.valid is None else self.valid[index]
        self.z = self.z[kept]
        if self.averages is not None:
            self.averages = self.averages[0][kept], self.averages[1][kept]
        for name in _Results.NAMES:
            setattr(self, name, getattr(self, name)[kept])
        return pytree.tree_map(lambda leaf: leaf[kept], state), active[kept]

    def solution(self, z: Tensor) -> Solution:
        """Return the report with the value ``z``."""
        trace = torch.stack(self.trace) if self.trace else None
        if self.stopping.scope != "prefix":
            return Solution(z, self.iterations, self.own_residual, self.converged, self.diverged, trace=trace)
        by_token = (-1, self.tokens)
        return Solution.of_tokens(
            z,
            iterations=self.iterations.view(by_token),
            residual=self.own_residual.view(by_token),
            converged=self.converged.view(by_token),
            diverged=self.diverged.view(by_token),
            trace=None if trace is None else trace.view(len(self.trace), *by_token),
        )


class _Results:
    """What is known of all rows, once some have left the working set."""

    NAMES = ("best", "measured", "own_residual", "iterations", "converged", "diverged")

    def __init__(self, loop: _Loop) -> None:
        self.rows = torch.arange(loop.shape[0], device=loop.z.device)
        self.tokens = loop.tokens
        self.values = {name: getattr(loop, name).clone() for name in self.NAMES}
        self.trace: list[Tensor] = []

    def write(self, loop: _Loop) -> None:
        """Write the working set's rows into the whole."""
        tokens = torch.arange(self.tokens, device=self.rows.device)
        index = (self.rows[:, None] * self.tokens + tokens).reshape(-1)
        for name, whole in self.values.items():
            whole[index] = getattr(loop, name)
        for part in loop.trace:
            whole = part.new_full((self.values["measured"].numel(),), torch.nan)
            whole[index] = part
            self.trace.append(whole)
        loop.trace = []

    def restore(self, loop: _Loop) -> None:
        """Give the whole back to the loop."""
        for name, whole in self.values.items():
            setattr(loop, name, whole)
        loop.trace = self.trace


def _where(active: Tensor, new: Any, old: Any) -> Any:
    """Take the new state for active elements; the old one stands still for the others."""

    def choose(new_leaf: Tensor, old_leaf: Tensor) -> Tensor:
        return torch.where(active.view(-1, *[1] * (new_leaf.ndim - 1)), new_leaf, old_leaf)

    return pytree.tree_map(choose, new, old)
