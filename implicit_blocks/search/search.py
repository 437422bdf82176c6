"""``Search``: a solver with a stopping rule and further options; ``solve_fixed_point``: with a gradient.

The loop is in ``implicit_blocks.search.loop``.

Shape legend: B batch, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from implicit_blocks._utils.describe import described
from implicit_blocks.exits.exit import Exit
from implicit_blocks.interfaces import GradientEstimator, LowPrecisionMap, Map, SearchingSolver, Solver
from implicit_blocks.ops.backends import is_forward_mode, is_transformed, is_vmapped
from implicit_blocks.registry.contracts import require
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.search.loop import Loop, flatten_features
from implicit_blocks.search.loops import LoopCounts, run_loops
from implicit_blocks.search.policies import LookAhead, MovingAverage, PrefixCommit
from implicit_blocks.search.state import RowCompaction, StatusRule
from implicit_blocks.search.trace import Trace
from implicit_blocks.search.two_stages import search_in_two_stages
from implicit_blocks.search.windowed import WindowedSearch
from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import require_count, require_share


@dataclass
class Search:
    """A solver with its stopping rule: calling it finds ``z = f(z)`` and reports how the search went.

    Args:
        solver: the update rule.
        stopping: tolerance, iterations, norm, and scope. With scope ``sequence`` an element is a row of the
            batch. With ``prefix`` it is a token, ``z`` is (B, L, …) and ``f`` must be causal in L: a token
            freezes once its own residual and those of all tokens before it are within the tolerance, so that
            its value depends on no later token.
        valid: (B, L) bool, False at padding, which keeps its start and enters no norm: neither the stopping
            rule nor the solver sees it change.
        trace: keep the residual of every call.
        moving_average: α in (0, 1], or None. The search then returns an average of its iterates, for maps
            that are noisy: ``m ← (1 − α) m + α f(z)`` replaces ``f(z)`` in everything below, and the same
            average of the points, ``z̄``, replaces ``z``; both begin with the first iterate. The solver still
            receives ``z`` and ``f(z)`` themselves.
        compact: let rows that are done leave the batch, where ``f`` has ``select_rows``. The remaining rows
            may differ in the last digits from a run without, as matrix products of another size do. A
            `RowCompaction` sets the batch sizes; by default they are bucketed on a GPU.
        commit_prefix: let tokens that are done in every row leave too, with prefix scope: they are committed
            as state, at multiples of this number of tokens (choose one of the mixer's chunk size), and the
            search continues with the rest. For maps that can be cut in time (``SequenceMap``), at the cost of
            one more call of ``f`` per token. Use it where tokens converge one after the other, over many
            iterations; None: they stay.
        agree: asked once per iteration whether the loop may end, where processes must call ``f`` equally
            often (``implicit_blocks.search.agreement``); None: it ends when this process's rows are done.
        lookahead: whether to call ``f`` before the host knows which elements are active; by default
            ``expects_all_active`` where Triton kernels report the residuals, else never.
        exit: the exit criterion (``implicit_blocks.exits``), whose measure decides in place of the residual
            when an element leaves, and which value it returns; None: the residual.
        loops: apply ``f`` this often, undamped, instead of searching: the solver and ``max_iterations`` have
            no effect, and the tolerance only decides whether the solution is reported as converged. The
            value of an element is its last one; a row that has diverged keeps its start.
        trajectory: numbers of calls t ≥ 1 after which the point is kept, for ``Solution.trajectory``.

    A ``SearchingSolver`` runs the search itself, by its own stopping rule. Other searches begin with the
    approximation of a ``LowPrecisionMap``, if it has one (``implicit_blocks.search.two_stages``).

    An *iteration* is one call of ``f``. The residual is that of the undamped map, ``‖f(z) − z‖`` in the norm
    of the element, divided by ``‖f(z)‖ + 1e-9 · scale`` with a relative norm, without overflow
    (``implicit_blocks.solution``); padding is left out. The scale is the largest ``‖f(z)‖`` of the
    element so far, at most 1. The returned value of an element is the ``f(z)`` whose residual was lowest.
    With prefix scope "residual" means there the largest among the token and those before it, so that an
    element that converged returns the value it converged with. An element whose ``f(z)`` or residual is not
    finite has *diverged*: it leaves the loop with the best value it had. With prefix scope the tokens after
    it leave too, since they can no longer converge.

    Raises ValueError for numbers out of their range and, when called, for a start or ``valid`` of a wrong
    shape or type.

    """

    solver: Solver
    stopping: Stopping
    valid: Tensor | None = None
    trace: bool = False
    moving_average: float | None = None
    compact: bool | RowCompaction = True
    commit_prefix: int | None = None
    agree: Agreement | None = None
    lookahead: LookAhead | None = None
    exit: Exit | None = None
    loops: LoopCounts | None = None
    trajectory: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.trajectory = tuple(self.trajectory)
        for iterate in self.trajectory:
            require_count("an iterate of the trajectory", iterate)
        if self.commit_prefix is not None:
            require_count("commit_prefix", self.commit_prefix)
        if self.moving_average is None:
            return
        require_share("moving_average", self.moving_average)
        if self.loops is not None or isinstance(self.solver, SearchingSolver):
            what = type(self.solver).__name__ if self.loops is None else "a fixed number of loops"
            raise ValueError(
                f"moving_average is {self.moving_average}, but {what} has no average; leave the option out"
            )

    def __call__(self, f: Map, z0: Tensor) -> Solution:
        """Search from ``z0`` (B, …), without gradients; at most ``max_iterations`` calls of ``f``."""
        self._check(z0)
        z0 = z0.detach()
        with torch.no_grad():
            if self.loops is not None:
                return self._take_loops(f, z0, self.loops)
            if isinstance(self.solver, SearchingSolver):
                return self.solver.run(f, z0, self)
            if isinstance(f, LowPrecisionMap) and f.begins_low:
                return search_in_two_stages(self, f, z0)
            return self.loop(f, z0).run()

    def loop(self, f: Map, z0: Tensor) -> Loop:
        """Return the loop that searches from ``z0`` (B, …), to be run without gradients."""
        prefix = self.stopping.scope == "prefix"
        average, multiple, compact = self.moving_average, self.commit_prefix, self.compact
        return Loop(
            f=f,
            z0=z0,
            solver=self.solver,
            stopping=self.stopping,
            valid=self.valid,
            agree=self.agree,
            lookahead=self.lookahead,
            exit=self.exit,
            averaging=None if average is None else MovingAverage(average),
            compaction=RowCompaction(bucket_sizes=z0.is_cuda) if compact is True else compact or None,
            commit=PrefixCommit(multiple) if multiple is not None and prefix else None,
            trace=Trace(torch.promote_types(z0.dtype, torch.float32)) if self.trace else None,
            trajectory=self.trajectory,
        )

    def _take_loops(self, f: Map, z0: Tensor, loops: LoopCounts) -> Solution:
        looped = run_loops(
            f,
            z0,
            loops,
            valid=self.valid,
            trajectory=self.trajectory,
            agree=self.agree,
            report=self.report if self.trace else None,
        )
        found = self.report(looped.before, looped.z, iterations=loops.total)
        diverged = found.diverged.view(-1, *[1] * (z0.ndim - 1))
        return replace(
            found,
            z=torch.where(diverged, z0, looped.z),
            trace=looped.trace,
            trajectory=looped.trajectory if self.trajectory else None,
        )

    def report(self, z: Tensor, fz: Tensor, *, iterations: int | Tensor) -> Solution:
        """Return a solution with the value ``z``, given ``f(z)``, both (B, …), measured as a search does.

        ``iterations`` is one number for all elements, or int64 per row (B,) or per token (B, L).
        """
        self._check(z)
        leading = 2 if self.stopping.scope == "prefix" else 1
        with torch.no_grad():
            point, value = (flatten_features(each.detach(), leading) for each in (z, fz))
            rule, status = StatusRule.start(self.stopping, point, self.valid, agree=self.agree)
            residual, status = rule.residuals(status, point, value, valid=self.valid)
            # Padding is measured too: its residual is 0.
            status = rule.update(status, residual, valid=self.valid, all_active=True).status
            return rule.solution(
                status._replace(
                    token_residual=status.last_residual, iterations=_spread(iterations, status.iterations)
                ),
                z,
                valid=self.valid,
            )

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
                f"{tuple(z0.shape[:2])}; give one flag per token, as torch.bool"
            )


def _spread(iterations: int | Tensor, like: Tensor) -> Tensor:
    """Return numbers of iterations in the shape of a status, (B, 1) or (B, T, 1)."""
    if not isinstance(iterations, Tensor):
        return torch.full_like(like, iterations)
    if iterations.ndim == like.ndim:  # per token, for a search of whole rows
        iterations = iterations.amax(1)
    count = iterations.to(like.device)
    return count.view(*count.shape, *[1] * (like.ndim - count.ndim)).expand_as(like).clone()


def solve_fixed_point(
    f: Map,
    z0: Tensor,
    *,
    solver: Solver,
    gradient: GradientEstimator,
    stopping: Stopping,
    window_length: int | None = None,
    **search: Any,
) -> Solution:
    """Find ``z = f(z)``: with the gradient estimator if gradients are enabled, else with the search alone.

    Args:
        f: the map; a ``RowMap`` lets rows that are done leave the batch.
        z0: the start, (B, …) with at least two dimensions.
        solver: the update rule of the search.
        gradient: how the fixed point is differentiated.
        stopping: when the search ends.
        window_length: number of tokens that are searched at a time (``WindowedSearch``); None: all.
        **search: further options of ``Search``: ``valid``, ``trace``, ``compact``, ``loops``, ``trajectory``.

    Raises:
        ContractError: the estimator returns no ``Solution``, or its value has another shape than ``z0``.
        NotImplementedError: within ``torch.export``, ``torch.func.vmap`` or forward-mode differentiation.

    """
    whole = Search(solver=solver, stopping=stopping, **search)
    if is_transformed():
        _refuse_transforms(gradient)
    cut = window_length is not None and window_length < z0.shape[1]
    bound = WindowedSearch(whole, window_length) if cut and window_length is not None else whole
    if not torch.is_grad_enabled():
        return bound(f, z0)
    solution = gradient(f, z0, bound)
    if not isinstance(solution, Solution) or solution.z.shape != z0.shape:
        _refuse_solution(gradient, solution, z0)
    return solution


def _refuse_transforms(gradient: GradientEstimator) -> None:
    """Refuse transforms that fail deep inside the loop, or give the derivative of something else."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "torch.export cannot capture a search for a fixed point, whose number of iterations depends on "
            "the data; export one call of the map, or an explicit model"
        )
    if is_vmapped():
        raise NotImplementedError(
            "torch.func.vmap cannot map over a search for a fixed point, whose number of iterations depends "
            "on the data; add the dimension to the batch, whose rows are solved independently"
        )
    if is_forward_mode() and not (torch.is_grad_enabled() and not gradient.searches):
        raise NotImplementedError(
            "forward-mode differentiation would go through the iterations of the search, not through the "
            "gradient estimator; use reverse mode (backward, torch.func.grad, torch.func.vjp), or the "
            "gradient Unrolled, which supports forward mode"
        )


def _refuse_solution(gradient: GradientEstimator, solution: Any, z0: Tensor) -> None:
    """Refuse what is no ``Solution``, or one whose value has another shape than the start."""
    found = (
        f"its value is {described(solution.z)}, the start is {described(z0)}; their shapes must agree"
        if isinstance(solution, Solution)
        else f"it returned {described(solution)}; return the search's solution with your value: "
        "solution.with_value(z)"
    )
    require(False, gradient, "returns a Solution", found)
