"""How an implicit model solves ``z* = f(z*)``: by a search, or by a fixed number of loops.

Shape legend: B batch, L tokens of a window, C core width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.gradients import LastLoops
from implicit_blocks.interfaces import Solver, State
from implicit_blocks.models.parts import ModelWeights, OutputMap, Prepared
from implicit_blocks.models.stack import BoundMap
from implicit_blocks.registry import build
from implicit_blocks.search.agreement import fixed_budget
from implicit_blocks.search.loops import LoopCounts
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.search.search import Search, solve_fixed_point
from implicit_blocks.solution import Solution, finite_or
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.families import ExitSpec

if TYPE_CHECKING:
    from implicit_blocks.exits.exit import Exit
    from implicit_blocks.models.implicit import ImplicitLM
    from implicit_blocks.search.agreement import Agreement


class SearchPlan(NamedTuple):
    """How a call of a model searches, in training or evaluation; the same in all its windows."""

    solver: Solver
    stopping: Stopping
    tolerance: float
    """The largest residual reported as converged; that of ``stopping`` is 0 where a depth ends the search."""
    search: SearchOptions | None
    """The options of the call."""
    loops: LoopCounts | None
    """The number of loops; None: the stopping rule ends them."""
    trajectory: tuple[int, ...]
    """The iterates that the call, or the objective in training, reads."""
    trace: bool


def solve_window(
    model: ImplicitLM,
    f: BoundMap,
    start_BLC: Tensor,
    prepared: Prepared,
    *,
    weights: ModelWeights,
    plan: SearchPlan,
    commit: bool = False,
) -> tuple[Solution, tuple[State, ...]]:
    """Find ``z* = f(z*)`` in a window, and with ``commit`` the states of the core's layers after it.

    Committing takes one more call of ``f``, or the last one of a fixed number of loops; so does an evaluation
    without gradients that searches. Exit criteria that read predictions need the prepared window and the
    weights for the map to the head's input.
    """
    states = prepared.core
    if model.spec.state_policy == "per_loop" and (commit or f.window.start):
        _check_loops(model, plan)
        return _take_loops_with_states(model, f, start_BLC, states, plan=plan, commit=commit)
    loops = plan.loops
    final_call = commit or (loops is None and not torch.is_grad_enabled())
    exit = None
    if loops is None and not model.training:
        exit = exit_criterion(model, prepared, weights, start_BLC, plan.search)
    solution = _solve(model, f, start_BLC, plan, exit=exit, final_call=final_call)
    if not final_call:
        return solution, states
    constant = loops is not None and bool(loops.differentiated == 0)  # no loop, not even the last one
    with torch.set_grad_enabled(torch.is_grad_enabled() and not constant):
        mapped_BLC, states = f.commit(solution.z) if commit else (f(solution.z), states)
    if loops is not None:
        return _with_last_loop(model, f, solution, mapped_BLC, plan), states
    if not torch.is_grad_enabled():  # otherwise the value is the gradient estimator's
        solution = solution.with_value(finite_or(mapped_BLC, solution.z))
    return solution, states


def _solve(
    model: ImplicitLM,
    f: BoundMap,
    start_BLC: Tensor,
    plan: SearchPlan,
    *,
    exit: Exit | None,
    final_call: bool,
) -> Solution:
    """Find ``z* = f(z*)``, with the gradient estimator's gradient while gradients are recorded.

    With ``final_call`` the caller makes the last of a fixed number of loops.
    """
    solver, stopping, tolerance, search, loops, trajectory, trace = plan
    captured = f.stack.graphs is not None and not (model.bidirectional or torch.is_grad_enabled())
    searched = f.without_padding() if captured and f.window.trailing else f
    at_evaluation = model.spec.at_evaluation
    options: dict[str, Any] = {
        "valid": f.window.valid_BL,
        "trajectory": trajectory,
        "agree": _agreement(model, f),
        "trace": trace,
        "compact": f.stack.graphs is None or f.stack.graphs.compact,
    }
    if loops is not None:
        gradient = _gradient_of_loops(model)
        if final_call and loops.maximum == 1:
            return Search(solver=solver, stopping=stopping).report(start_BLC, start_BLC, iterations=0)
        loops = loops.one_less(gradient.loops) if final_call else loops
        looped = Search(solver=solver, stopping=stopping, loops=loops, **options)
        return gradient(f, start_BLC, looped) if torch.is_grad_enabled() else looped(searched, start_BLC)
    # The predictions of a coda at a token would depend on when the tokens before it are committed.
    commits = not model.training and (model.coda is None or exit is None or exit.reads != "predict")
    solution = solve_fixed_point(
        searched,
        start_BLC,
        solver=solver,
        gradient=model.gradient,
        stopping=stopping,
        window_length=(model.spec if model.training else at_evaluation).window_length,
        commit_prefix=at_evaluation.commit_prefix if commits else None,
        moving_average=None if search is None else search.moving_average,
        exit=exit,
        **options,
    )
    return solution if tolerance == stopping.tolerance else solution.with_tolerance(tolerance)


def _gradient_of_loops(model: ImplicitLM) -> LastLoops:
    """Return the gradient estimator of a fixed number of loops; by default all of them are differentiated."""
    chosen = model.gradient
    return chosen if model.training and isinstance(chosen, LastLoops) else LastLoops()


def _agreement(model: ImplicitLM, f: BoundMap) -> Agreement | None:
    """Return what makes the processes that share the window decide alike; None: there is one."""
    return model.agree if f.window.part is None else f.window.part.agree


def exit_criterion(
    model: ImplicitLM,
    prepared: Prepared,
    weights: ModelWeights,
    z_BLC: Tensor,
    search: SearchOptions | None = None,
) -> Exit | None:
    """Return the exit criterion of evaluation in a window; None: the residual decides."""
    if exit_spec(model, search).kind in _BY_RESIDUAL_OR_COUNT:
        return None
    output = model.output_map(prepared, weights)
    if output.pointwise:
        return _bound_criterion(model, lambda points: model.predict(output(points)), search)
    return _bound_criterion(model, Predictions(output, model.predict, (len(z_BLC), z_BLC.shape[1])), search)


def _check_loops(model: ImplicitLM, plan: SearchPlan) -> None:
    """Raise ValueError where a call takes another number of loops than that of the kept states."""
    states, total = model.core_loops, plan.loops and plan.loops.total
    if isinstance(total, int) and total == states:
        return
    raise ValueError(
        f"the model keeps one state for each of its {states} loops, and the call takes loops {total}; leave "
        f"out loops and exit in evaluation, train with depth 'fixed' of {states} loops and gradient "
        "'last_loops', or change at_evaluation.exit of the model's spec"
    )


def exit_of_points(model: ImplicitLM, search: SearchOptions) -> Exit | None:
    """Return the exit criterion of single tokens, as in decoding slots; None: the residual decides.

    Raises:
        ValueError: the criterion reads predictions, which depend on other tokens here.

    """
    spec, output = model.spec, OutputMap.of(model)
    criterion = _bound_criterion(model, lambda points: model.predict(output(points)), search)
    if criterion is not None and criterion.reads == "predict" and (spec.coda or spec.core_residual):
        raise ValueError(
            "the exit criterion reads predictions, which a coda computes from several tokens; choose the "
            "criterion 'residual' or 'second_difference' for decoding in slots"
        )
    return criterion


def _take_loops_with_states(
    model: ImplicitLM,
    f: BoundMap,
    z_BLC: Tensor,
    states: tuple[State, ...],
    *,
    plan: SearchPlan,
    commit: bool,
) -> tuple[Solution, tuple[State, ...]]:
    """Take the loops, each after its own states of the core's layers.

    With ``commit`` the returned states are those after the window.
    """
    layers, after = len(model.backbone.layers), list[State]()
    of_loops = iter([states[first : first + layers] for first in range(0, len(states), layers)])

    def loop(z_BLC: Tensor) -> Tensor:
        own = f.with_states(next(of_loops))
        if not commit:
            return own(z_BLC)
        z_BLC, committed = own.commit(z_BLC)
        after.extend(committed)
        return z_BLC

    looped = Search(
        solver=plan.solver,
        stopping=plan.stopping,
        valid=f.window.valid_BL,
        trace=plan.trace,
        agree=fixed_budget,  # each state is that of one call: none is repeated without rows that diverged
        loops=plan.loops,
        trajectory=plan.trajectory,
    )
    gradient = _gradient_of_loops(model)
    solution = gradient(loop, z_BLC, looped) if torch.is_grad_enabled() else looped(loop, z_BLC)
    return solution, tuple(after) if commit else states


def _with_last_loop(
    model: ImplicitLM, f: BoundMap, solution: Solution, mapped_BLC: Tensor, plan: SearchPlan
) -> Solution:
    """Return the solution after the last of a fixed number of loops, given that before it.

    The status is that of the last loop; what diverged before has diverged. A token whose value overflows in
    the last loop keeps the one before it.
    """
    loops, agree = plan.loops, _agreement(model, f)
    assert loops is not None
    rule = Search(solver=plan.solver, stopping=plan.stopping, valid=f.window.valid_BL, agree=agree)
    last = rule.report(solution.z, mapped_BLC, iterations=loops.total)
    lost, converged, diverged = solution.token_diverged, last.token_converged, last.token_diverged
    if lost is not None and converged is not None and diverged is not None:
        last = replace(last, token_converged=converged & ~lost, token_diverged=diverged | lost)
    value = mapped_BLC if torch.is_grad_enabled() else finite_or(mapped_BLC, solution.z)
    iterates, trace = dict(solution.trajectory or {}), None
    if loops.maximum in plan.trajectory:
        iterates[loops.maximum] = value
    if plan.trace:
        before = () if solution.trace is None else solution.trace  # none before the only loop
        trace = torch.stack([*before, last.finest_residual])
    diverged = last.diverged | solution.diverged
    penalty = _gradient_of_loops(model).penalty(solution.z, mapped_BLC, valid=f.window.valid_BL)
    return replace(
        last,
        z=value,
        converged=last.converged & ~solution.diverged,
        diverged=diverged,
        trace=trace,
        penalty=None if penalty is None else penalty.masked_fill(diverged, 0.0),
        trajectory=iterates or None,
    )


_BY_RESIDUAL_OR_COUNT = ("residual", "fixed")
"""Kinds of exit criteria that need nothing of the model."""


def exit_spec(model: ImplicitLM, search: SearchOptions | None) -> ExitSpec:
    """Return the spec of the exit criterion of evaluation: that of the call, if it chooses one."""
    asked = None if search is None else search.exit
    return model.spec.at_evaluation.exit if asked is None else asked


def _bound_criterion(
    model: ImplicitLM, predict: Callable[[Tensor], Tensor], search: SearchOptions | None
) -> Exit | None:
    """Return the exit criterion of evaluation, bound to what it reads; None: the residual decides."""
    spec = exit_spec(model, search)
    if spec.kind in _BY_RESIDUAL_OR_COUNT:
        return None
    from implicit_blocks.exits.exit import Readout

    criterion: Exit = build(spec)
    if search is not None and search.tolerance is not None and criterion.threshold is not None:
        raise ValueError(
            f"tolerance is {search.tolerance}, but exit criterion {spec.kind!r} has a threshold of its own; "
            "leave tolerance out, or give exit with another threshold, as in KLExitSpec(tolerance=1e-3)"
        )
    return criterion.bind(Readout(predict=predict, gate=model.exit_gate))


@dataclass(frozen=True)
class Predictions:
    """The logits of iterates, given all points of a window at once, (E, C) with E = B · L."""

    output: OutputMap
    predict: Callable[[Tensor], Tensor]
    shape: tuple[int, int]

    def __call__(self, points_EC: Tensor) -> Tensor:
        """Return the logits, (E, V)."""
        hidden = self.output(points_EC.view(*self.shape, points_EC.shape[-1]))
        return self.predict(hidden).flatten(0, 1)

    def select_rows(self, rows: Tensor) -> Predictions:
        """Return those of these rows, (R,) int64 indices."""
        return replace(self, output=self.output.select_rows(rows), shape=(len(rows), self.shape[1]))

    def first(self, tokens: int) -> Predictions:
        """Return those of the window's first tokens."""
        return replace(self, output=self.output.first(tokens), shape=(self.shape[0], tokens))

    def after(self, z_BLC: Tensor) -> Predictions:
        """Return those of the tokens after the first ones, which are committed at ``z``."""
        shape = (self.shape[0], self.shape[1] - z_BLC.shape[1])
        return replace(self, output=self.output.after(z_BLC), shape=shape)
