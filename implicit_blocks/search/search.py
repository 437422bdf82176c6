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

from implicit_blocks._utils.validation import require_count, require_share
from implicit_blocks.contract_checks import (
    check_next_point,
    check_solver_state,
    check_updated_state,
    point_and_state,
)
from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.interfaces import Map, RowMap, SequenceMap, Solver
from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.residual import difference, initial_scale, narrow, norm, relative_residual
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.search.compaction import FullResults
from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping


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
            (``implicit_blocks.search.agreement``); None: it ends when this process's rows are done.
        moving_average: α in (0, 1], or None. The search then answers with an average of its iterates, for
            maps that are noisy: ``m ← (1 − α) m + α f(z)`` takes the place of ``f(z)`` in all that follows,
            and the same average of the points, ``z̄``, that of ``z``; both begin with the first iterate. The
            solver goes on from ``z`` and ``f(z)`` themselves.
        compact: let rows that are done leave the batch, where ``f`` offers ``select_rows``. Rows that go on
            may differ in the last digits from a run without, as matrix products of another size do.
        commit_prefix: let tokens that are done in every row leave too, with prefix scope: they are committed
            as state, at multiples of so many tokens (choose one of the mixer's chunk), and the rest goes on.
            For maps that can be cut in time (``SequenceMap``); one more call of ``f`` a token. Worth it where
            tokens converge one after the other, over many iterations; None: they stay.

    An *iteration* is one call of ``f``. The residual is that of the undamped map, ``‖f(z) − z‖`` in the norm
    of the element, divided by ``‖f(z)‖ + 1e-9 · scale`` with a relative norm, without overflow
    (``implicit_blocks.ops.residual``); padding is left out. The scale is the largest ``‖f(z)‖`` of the
    element so far, at most 1. The returned value of an element is the ``f(z)`` whose residual was lowest;
    with prefix scope "residual" means there the largest among the token and those before it, so that an
    element that converged returns the value it converged with. An element whose ``f(z)`` or residual is not
    finite has *diverged*: it leaves the loop with the best value it had. With prefix scope the tokens behind
    it leave too, since they can no longer converge.

    Raises ValueError for numbers out of their range and, when called, for a start or flags that don't fit.

    """

    solver: Solver
    stopping: Stopping
    valid: Tensor | None = None
    trace: bool = False
    moving_average: float | None = None
    compact: bool = True
    commit_prefix: int | None = None
    agree: Agreement | None = None

    def __post_init__(self) -> None:
        if self.moving_average is not None:
            require_share("moving_average", self.moving_average)
        if self.commit_prefix is not None:
            require_count("commit_prefix", self.commit_prefix)

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
            loop.begin()
            loop.all_active = True  # padding too: its residual is 0
            loop.measure(
                loop.residuals(loop.flatten_features(z.detach()), loop.flatten_features(fz.detach()))
            )
            loop.token_residual = loop.last_residual
            loop.iterations.fill_(iterations)
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
        valid = self.valid
        if valid is not None and (valid.shape != z0.shape[:2] or valid.dtype != torch.bool):
            raise ValueError(
                f"valid has shape {tuple(valid.shape)} of {valid.dtype}, z0 starts with "
                f"{tuple(z0.shape[:2])}; give one flag a token, as torch.bool"
            )


def still_at_padding(fz: Tensor, z: Tensor, valid_BL: Tensor | None) -> Tensor:
    """Return ``f(z)``, and ``z`` itself at padding; both (B, L, …).

    A solver that mixes whole rows, as Anderson does, would weigh what happens there.
    """
    if valid_BL is None:
        return fz
    return torch.where(valid_BL.view(*valid_BL.shape, *[1] * (z.ndim - 2)), fz, z)


class _Loop:
    """One run of a search: the working set of rows, and what is known of each element.

    Points are (B, F) with scope ``sequence``, (B, L, F) with ``prefix``; what is known of the elements has 1
    in the place of F, so that it masks points as it is. Calls of operators are what an iteration of a small
    map costs, so nothing is kept that can be told from something else:

    - ``last_residual``, the residual of an element's last call, which stands still once it has left the loop;
    where
      it is not finite the element has diverged. With prefix scope the largest among a token's own and those
      before it decides, which is not finite behind a token that has diverged.
    - ``lowest_residual``, the lowest that decided; under the tolerance the element has converged.
    """

    def __init__(self, search: Search, f: Map, z0: Tensor) -> None:
        self.search, self.stopping, self.solver, self.f = search, search.stopping, search.solver, f
        self.shape = self.whole = z0.shape  # of the working set, and of the answer
        self.prefix = self.stopping.scope == "prefix"
        self.valid = search.valid
        self.z = self.flatten_features(z0)
        self.best = self.z
        self.precision = torch.promote_types(z0.dtype, torch.float32)  # of the residuals that are reported
        self.bucket_sizes = z0.is_cuda  # rows leave so that few sizes of batch are seen
        self.fused = z0.is_cuda and z0.dtype != torch.float64 and self.valid is None and available("triton")
        self.all_active = True
        self.trace: list[Tensor] = []
        self.traced: list[tuple[Tensor, Tensor]] = []  # residuals that are to be traced, and whose they are
        self.averages: tuple[Tensor, Tensor] | None = None  # of z and of f(z), where they are asked for
        self.reader = AsyncHostCopy()
        # What the kernel of the flags says of each row, where there is one.
        self.row_counts: Tensor | None = None
        # The residual of the element that is nearest to its end, call by call; ahead of them, what a search
        # that begins anywhere may expect of its first two: f(z) is as far from z as it is from 0.
        self.lowest = [5.0, 1.0] if self.stopping.norm == "relative" else []
        self.results: FullResults | None = None  # of all rows and tokens, once some have left
        # the largest residual seen of a row's committed tokens, if any
        self.prefix_residual: Tensor | None = None

    def begin(self) -> None:
        """Make what is known of the elements: nothing yet."""
        count, device = (*self.z.shape[:-1], 1), self.z.device
        self.scale, self.scale_limit = initial_scale(self.z, count)
        precision = torch.float32 if self.fused else self.scale.dtype
        self.last_residual = self.z.new_zeros(count, dtype=precision)
        self.lowest_residual = self.z.new_full(count, torch.inf, dtype=precision)
        # that of the best point: with prefix scope, of the token alone
        self.token_residual = self.lowest_residual
        self.iterations = self.z.new_zeros(count, dtype=torch.int64)
        self.active = torch.ones(count, dtype=torch.bool, device=device)
        if self.prefix and self.valid is not None:
            self.active, self.all_active = self.valid[..., None], False

    # ------------------------------------------------------------------------------------ layout

    def flatten_features(self, z: Tensor) -> Tensor:
        """Lay (B, L, …) out as points."""
        return z if z.ndim == 2 + self.prefix else z.reshape(*z.shape[: 1 + self.prefix], -1)

    def elements(self, z: Tensor) -> Tensor:
        """Lay points out as a solver sees them, (E, F)."""
        return z.reshape(-1, z.shape[-1]) if self.prefix else z

    def call(self, z: Tensor) -> Tensor:
        """Call the map on points."""
        whole = z if z.ndim == len(self.shape) else z.reshape(-1, *self.shape[1:])
        return self.flatten_features(still_at_padding(self.f(whole), whole, self.valid))

    def call_elements(self, z_EF: Tensor) -> Tensor:
        """Call the map on elements: the handle that a solver is given."""
        return self.elements(self.call(z_EF.reshape(self.z.shape)))

    def residuals(self, z: Tensor, fz: Tensor) -> Tensor:
        """Return each element's residual, and take note of its scale."""
        relative = self.stopping.norm == "relative"
        if self.fused and z.is_contiguous() and fz.is_contiguous():
            from implicit_blocks.ops.kernels.residual import residuals

            residual, self.scale = residuals(z, fz, scale=self.scale, relative=relative)
            return residual
        step, value = difference(z, fz), fz
        if self.valid is not None:
            if self.prefix:
                step = step.masked_fill(~self.valid[..., None], 0.0)
            else:
                padding = ~self.valid.view(*self.valid.shape, *[1] * (len(self.shape) - 2))
                shape = (-1, *self.shape[1:])
                step = step.view(shape).masked_fill(padding, 0.0).flatten(1)
                value = fz.view(shape).masked_fill(padding, 0.0).flatten(1)
        if not relative:
            return narrow(norm(step), self.lowest_residual.dtype)
        residual, self.scale = relative_residual(step, value, self.scale, self.scale_limit)
        return narrow(residual, self.lowest_residual.dtype)

    # ------------------------------------------------------------------------------------ the loop

    def run(self) -> Solution:
        z_EF = self.elements(self.z)
        state = self.solver.init(z_EF)
        check_solver_state(self.solver, state, z_EF.shape[0])
        # A GPU is given its first call at once, and works while the host gets ready for what comes after.
        ahead = self.call(self.z) if self.z.is_cuda else None
        self.begin()
        for iteration in range(1, self.stopping.max_iterations + 1):
            fz = self.call(self.z) if ahead is None else ahead
            measured, value = self.averaged(self.z, fz)
            residual = self.residuals(measured, value)
            if self.search.trace:
                self.traced.append((residual, self.active))
            improved = self.measure(residual)
            if iteration == self.stopping.max_iterations:  # nothing is decided any more: the host goes on
                self.best = torch.where(improved, value, self.best)
                break
            early, ahead = self.expects_all_active(), None
            if early:
                # The device needn't wait while the host reads; what is called in vain is thrown away.
                if self.row_counts is not None:
                    self.reader.send(self.row_counts)
                proposed, proposed_state = self.next_point(z_EF, fz, state)
                ahead = self.call(proposed.reshape(self.z.shape))
            remaining, rows, every = self.counts(improved)
            # torch.where, never arithmetic with the mask: a NaN in what is discarded must not spread
            self.best = value if every else torch.where(improved, value, self.best)
            if self.search.ends(remaining == 0):
                break
            if not early:
                proposed, proposed_state = self.next_point(z_EF, fz, state)
            if iteration == 1:
                check_updated_state(self.solver, proposed_state, state, z_EF.shape[0])
            z = proposed.reshape(self.z.shape) if self.prefix else proposed
            self.all_active = remaining == self.active.numel()
            if self.all_active:
                self.z, z_EF, state = z, proposed, proposed_state
            else:
                ahead = None
                self.z = torch.where(self.active, z, self.best)
                try:
                    chosen = _where(self.active, proposed_state, state)
                except (ValueError, RuntimeError):  # its layout may have changed after the first update
                    check_updated_state(self.solver, proposed_state, state, z_EF.shape[0])
                    raise
                state = self.compact(chosen, remaining, rows)
                z_EF = self.elements(self.z)
        if self.results is not None:
            self.results.write(self)
            self.results.restore(self)
        return self.solution(self.best.reshape(self.whole))

    def next_point(self, z_EF: Tensor, fz: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return what the solver proposes, and its state."""
        returned = self.solver.update(z_EF, self.elements(fz), state, self.call_elements)
        proposed, after = point_and_state(self.solver, returned)
        check_next_point(self.solver, proposed, z_EF)
        return proposed, after

    def expects_all_active(self) -> bool:
        """Whether all elements, none of which has left, are expected to stay above the tolerance once more.

        Residuals fall by much the same factor from call to call. Where processes agree on each call there is
        none in vain.
        """
        if self.row_counts is None or len(self.lowest) < 2:
            return False
        if not self.all_active or self.search.agree is not None:
            return False
        before, last = self.lowest[-2:]
        return before > 0 and last * min(1.0, last / before) > 2 * self.stopping.tolerance

    def counts(self, improved: Tensor) -> tuple[int, int, bool]:
        """Return how many elements go on, in how many rows, and whether all elements are better now.

        The loop's one reading from the device in an iteration.
        """
        if self.row_counts is not None:
            active, better, lowest = self.reader.read(self.row_counts)
            self.lowest.append(min(lowest))
        else:
            # Elements that have left are no better, so where some have only the others need counting.
            flags = torch.stack((self.active, improved)) if self.all_active else self.active
            counts = flags.sum(list(range(1 + self.all_active, flags.ndim)))
            active, better = self.reader.read(counts) if self.all_active else (self.reader.read(counts), [0])
        return int(sum(active)), sum(map(bool, active)), sum(better) == improved.numel()

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

    def measure(self, residual: Tensor) -> Tensor:
        """Take in the residuals of a call; return which elements are better now than ever."""
        kept = self.last_residual, self.lowest_residual, self.token_residual, self.iterations, self.active
        if self.fused and all(tensor.is_contiguous() for tensor in kept):
            return self.measure_at_once(residual)
        self.row_counts = None
        self.iterations = self.iterations + self.active
        self.last_residual = (
            residual if self.all_active else torch.where(self.active, residual, self.last_residual)
        )
        # NaN where one so far is NaN
        largest = self.last_residual.cummax(1).values if self.prefix else self.last_residual
        if self.prefix_residual is not None:
            largest = torch.maximum(largest, self.prefix_residual)
        # No element that has left the loop can be better: what is seen of it, and of those before it in the
        # prefix, stands still, or is not finite.
        improved = largest < self.lowest_residual
        self.lowest_residual = torch.fmin(largest, self.lowest_residual)
        if self.prefix:
            self.token_residual = torch.where(improved, self.last_residual, self.token_residual)
        else:
            self.token_residual = self.lowest_residual
        # Neither converged nor diverged, in two operators: inf mod inf is NaN, which is above nothing.
        self.active = largest.fmod(torch.inf) > self.stopping.tolerance
        if self.prefix and self.valid is not None:
            self.active = self.active & self.valid[..., None]
        return improved

    def measure_at_once(self, residual: Tensor) -> Tensor:
        """Do the same by a kernel, which counts too."""
        from implicit_blocks.ops.kernels.search_flags import updated

        new = updated(
            residual,
            last_residual=self.last_residual,
            lowest_residual=self.lowest_residual,
            token_residual=self.token_residual,
            iterations=self.iterations,
            active=self.active,
            prefix_residual=self.prefix_residual,
            tolerance=self.stopping.tolerance,
        )
        self.last_residual, self.lowest_residual, self.token_residual, self.iterations, self.active = new[:5]
        self.row_counts = new.counts
        return new.improved

    def compact(self, state: Any, remaining: int, rows: int) -> Any:
        """Let what is done leave the working set, where that pays; return the solver's state of the rest.

        ``remaining`` elements go on, in so many ``rows``.
        """
        if self.search.compact and self.can_drop(rows):
            state = self.drop(self.results_so_far(), rows, state)
        if done := self.can_commit(remaining):
            state = self.commit(self.results_so_far(), done, state)
        self.all_active = remaining == self.active.numel()
        return state

    def results_so_far(self) -> FullResults:
        """Return what is known of all rows and tokens, also of those that have left."""
        self.results = self.results or FullResults(self)
        self.results.write(self)
        return self.results

    def can_drop(self, count: int) -> bool:
        """Whether it pays to go on with ``count`` of the rows: the half or fewer."""
        fewest = max(count, self.shape[0] // 8) if self.bucket_sizes else count
        return count > 0 and 2 * fewest <= self.z.shape[0] and isinstance(self.f, RowMap)

    def drop(self, results: FullResults, count: int, state: Any) -> Any:
        """Let rows that are done leave the working set, where ``count`` go on; return the solver's state."""
        rows = self.active.flatten(1).any(1)
        if self.bucket_sizes:
            # Four sizes of batch, for compiled kernels and captured graphs: rows that are done fill up.
            size = rows.numel()
            while size // 2 >= max(count, self.shape[0] // 8):
                size //= 2
            index = torch.argsort((~rows).to(torch.uint8), stable=True)[:size].sort().values
        else:
            index = rows.nonzero().squeeze(1)
        results.rows = results.rows[index]
        assert isinstance(self.f, RowMap)
        self.f = self.f.select_rows(index)
        self.valid = None if self.valid is None else self.valid[index]
        self.z, self.active, self.scale = self.z[index], self.active[index], self.scale[index]
        if self.averages is not None:
            self.averages = self.averages[0][index], self.averages[1][index]
        self.prefix_residual = None if self.prefix_residual is None else self.prefix_residual[index]
        for name in FullResults.NAMES:
            setattr(self, name, getattr(self, name)[index])
        tokens = self.z.shape[1] if self.prefix else 1
        kept = (index[:, None] * tokens + torch.arange(tokens, device=index.device)).reshape(-1)
        return pytree.tree_map(lambda leaf: leaf[kept], state)

    def can_commit(self, remaining: int) -> int:
        """Return how many tokens can be committed, ``remaining`` elements being active; 0: none yet.

        A commit costs a call for those tokens, and new shapes for the others: not for less than an eighth.
        """
        multiple = self.search.commit_prefix
        if multiple is None or not self.prefix or 8 * remaining > 7 * self.active.numel():
            return 0
        behind = self.active.any(0).flatten().cummax(0).values  # not done in every row, or after such a token
        tokens = self.active.shape[1]
        (waiting,) = self.reader.read(behind.sum(0, keepdim=True))
        done: int = (tokens - waiting) // multiple * multiple
        return done if 8 * done >= tokens and isinstance(self.f, SequenceMap) else 0

    def commit(self, results: FullResults, done: int, state: Any) -> Any:
        """Let the first ``done`` tokens leave the working set; return the solver's state of the others."""
        results.first += done
        assert isinstance(self.f, SequenceMap)
        rows, tokens = self.active.shape[:2]
        self.f = self.f.after(self.best[:, :done].reshape(rows, done, *self.shape[2:]))
        seen = self.last_residual[:, :done].amax(1, keepdim=True)  # not finite where one has diverged
        self.prefix_residual = (
            seen if self.prefix_residual is None else torch.maximum(seen, self.prefix_residual)
        )
        self.shape = torch.Size((self.shape[0], tokens - done, *self.shape[2:]))
        self.valid = None if self.valid is None else self.valid[:, done:]
        self.z, self.active = self.z[:, done:], self.active[:, done:]
        self.scale = self.scale[:, done:].contiguous()
        if self.averages is not None:
            self.averages = self.averages[0][:, done:], self.averages[1][:, done:]
        for name in FullResults.NAMES:
            setattr(self, name, getattr(self, name)[:, done:])

        def keep(leaf: Tensor) -> Tensor:
            kept: Tensor = leaf.unflatten(0, (rows, tokens))[:, done:].flatten(0, 1)
            return kept

        return pytree.tree_map(keep, state)

    def newly_traced(self) -> list[Tensor]:
        """Return what has been traced since this was last asked: residuals, NaN where an element had left."""
        traced, self.traced = self.traced, []
        if not traced:
            return []
        residuals, active = (torch.stack(kept) for kept in zip(*traced, strict=True))  # at once
        return list(narrow(residuals, self.precision).masked_fill_(~active, torch.nan))

    def solution(self, z: Tensor) -> Solution:
        """Return the report with the value ``z``."""
        self.trace += self.newly_traced()
        converged = self.lowest_residual <= self.stopping.tolerance
        if self.prefix and self.search.valid is not None:
            padding = ~self.search.valid[..., None]
            converged = converged | padding
            self.token_residual = self.token_residual.masked_fill(padding, 0.0)
        make = Solution.of_tokens if self.prefix else Solution
        return make(
            z,
            iterations=self.iterations.squeeze(-1),
            residual=narrow(self.token_residual, self.precision).squeeze(-1),
            converged=converged.squeeze(-1),
            diverged=~self.last_residual.isfinite().squeeze(-1),
            trace=torch.stack(self.trace).squeeze(-1) if self.trace else None,
        )


def _where(active: Tensor, new: Any, old: Any) -> Any:
    """Take the new state for active elements; the old one stands still for the others."""

    def choose(new_leaf: Tensor, old_leaf: Tensor) -> Tensor:
        return torch.where(active.view(-1, *[1] * (new_leaf.ndim - 1)), new_leaf, old_leaf)

    return pytree.tree_map(choose, new, old)
