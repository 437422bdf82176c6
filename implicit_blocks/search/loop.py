"""The loop of a search: call the map, observe its value, update the point, stop.

A solver proposes the next point. Measuring, freezing and keeping the best are the rule of
``implicit_blocks.search.state``, with the measure of an exit criterion, if there is one, in place of the
residual; everything else that acts on the working set is a policy that is passed in.

Shape legend: B rows, T tokens, E elements (B rows, or B · T tokens with prefix scope), F features. Points are
(B, F) with scope ``sequence`` and (B, T, F) with ``prefix``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks._utils.describe import described
from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.exits.exit import Exit, begin, effective, measured
from implicit_blocks.interfaces import Map, RowMap, SequenceMap, Solver
from implicit_blocks.registry.contracts import require
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.search.policies import LookAhead, MovingAverage, PrefixCommit, expects_all_active
from implicit_blocks.search.state import FullResults, RowCompaction, State, StatusRule, drop_prefix, take_rows
from implicit_blocks.search.trace import Trace, Trajectory
from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping


@dataclass(kw_only=True)
class Loop:
    """One run of a search.

    Args:
        f: the map; replaced by the map of what remains when rows or tokens leave.
        z0: the start, (B, …).
        solver: proposes the next point.
        stopping: tolerance, iterations, norm, scope.
        valid: (B, L) bool, False at padding.
        agree: asked once per iteration whether the loop may end; None: it ends when no element is active.
        lookahead: whether to launch the next call early; None: by the residuals that the Triton kernels
            report, elsewhere never.
        averaging: moving averages in place of the iterates.
        compaction: drops rows that are done.
        commit: commits tokens that are done.
        trace: collects the residuals.
        exit: the exit criterion whose measures decide; None: the residual.
        trajectory: numbers of calls, from 1; the point after each of them is kept, and no others.

    Raises:
        ValueError: the exit criterion does not fit the stopping rule, or a number of the trajectory is not an
            integer of at least 1.

    """

    f: Map
    z0: Tensor
    solver: Solver
    stopping: Stopping
    valid: Tensor | None = None
    agree: Agreement | None = None
    lookahead: LookAhead | None = None
    averaging: MovingAverage | None = None
    compaction: RowCompaction | None = None
    commit: PrefixCommit | None = None
    trace: Trace | None = None
    exit: Exit | None = None
    trajectory: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.exit is not None:
            self.exit = effective(self.exit, self.stopping)
        self.iterates = Trajectory(self.trajectory, self.stopping) if self.trajectory else None
        # dimensions of a point before its features
        self.leading = 2 if self.stopping.scope == "prefix" else 1
        self.results: FullResults | None = None
        self.calls = 0  # iterations taken
        self.lowest: list[float] = []  # lowest deciding residual of each call, where the kernel reports it
        self.reader = AsyncHostCopy() if self.z0.is_cuda else None

    def run(self) -> Solution:
        """Return the solution after at most ``stopping.max_iterations`` calls of the map."""
        z = flatten_features(self.z0, self.leading)
        solver_state = self.solver.init(self.elements(z))
        # A GPU receives its first call immediately, and works while the host prepares what follows.
        fz = self.call(z, self.valid) if z.is_cuda else None
        self.rule, status = StatusRule.start(self.stopping, z, self.valid, exit=self.exit, agree=self.agree)
        if self.lookahead is None and self.rule.fused:
            self.lookahead = expects_all_active
        exit_state = () if self.exit is None else begin(self.exit, self.elements(z))
        check_solver_state(self.solver, solver_state, z.shape[:-1].numel())
        self.state = State(z, z, status, solver_state, valid=self.valid, exit=exit_state)
        self.all_active = not (self.rule.prefix and self.valid is not None)
        for iteration in range(1, self.stopping.max_iterations + 1):
            self.calls = iteration
            if fz is None:
                fz = self.call(self.state.z, self.state.valid)
            value, improved, row_counts = self.observe(fz)
            if iteration == self.stopping.max_iterations:  # no decision is left: the host does not wait
                self.keep_best(value, improved)
                if self.iterates is not None and iteration in self.iterates:
                    self.iterates.add(iteration, self.freeze(*self.propose(fz)).z, self.results)
                break
            early, ahead = self.expects_all_active(), None
            if early:
                # The device works while the host reads the counts. A call made in vain is discarded.
                if self.reader is not None and row_counts is not None:
                    self.reader.send(row_counts)
                proposed, proposed_state = self.propose(fz)
                ahead = self.call(proposed, self.state.valid)
            remaining, rows, all_improved = self.count(improved, row_counts)
            self.keep_best(value, None if all_improved else improved)
            if self.ends(remaining == 0):
                break
            if not early:
                proposed, proposed_state = self.propose(fz)
            if iteration == 1:
                check_updated_state(self.solver, proposed_state, self.state.solver, improved.numel())
            self.all_active = remaining == improved.numel()
            if self.all_active:
                fz = ahead
                self.state = self.state._replace(z=proposed, solver=proposed_state)
            else:
                self.state = self.freeze(proposed, proposed_state)
                stay = self.shrink(remaining, rows)
                fz = None
                if ahead is not None and self.leading == 1 and self.exit is None:
                    # Rows do not see each other, so the values of active ones are those of the frozen state.
                    fz = ahead if stay is None else ahead[stay]
            if self.iterates is not None and iteration in self.iterates:
                self.iterates.add(iteration, self.state.z, self.results)
        found: State | FullResults = self.state
        if self.results is not None:
            found = FullResults.of(self.state, self.results, self.trace)
        z = found.best.reshape(self.z0.shape)
        trace = None if self.trace is None else self.trace.stack()
        iterates = None if self.iterates is None else self.iterates.finish(z)
        return self.rule.solution(found.status, z, valid=self.valid, trace=trace, trajectory=iterates)

    # ------------------------------------------------------------------------------------ steps

    def call(self, z: Tensor, valid: Tensor | None) -> Tensor:
        """Return the map's values of points."""
        item = self.z0.shape[self.leading :]
        whole = z if len(item) == 1 else z.reshape(*z.shape[:-1], *item)
        return flatten_features(still_at_padding(self.f(whole), whole, valid), self.leading)

    def elements(self, z: Tensor) -> Tensor:
        """Return points as a solver receives them, (E, F)."""
        return z.reshape(-1, z.shape[-1]) if self.leading == 2 else z

    def observe(self, fz: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Measure a value of the map, and update the status.

        Returns:
            the value that stands for ``f(z)`` in the results, where it is better than ever before, and the
            kernel's counts per row.

        """
        state = self.state
        point, value = state.z, fz
        if self.averaging is not None:
            point, value = self.averaging.update(state.averages, point, value)
            state = state._replace(averages=(point, value))
        residual, status = self.rule.residuals(state.status, point, value, valid=state.valid)
        if self.trace is not None:
            self.trace.add(residual, status.active)
        measure = None
        if self.exit is not None:
            measure, exit_state = measured(self.exit, point, value, residual, state.exit, valid=state.valid)
            state = state._replace(exit=exit_state)
        status, improved, row_counts = self.rule.update(
            status,
            residual,
            measure=measure,
            prefix_residual=state.prefix_residual,
            valid=state.valid,
            all_active=self.all_active,
        )
        self.state = state._replace(status=status)
        return value, improved, row_counts

    def expects_all_active(self) -> bool:
        """Whether to call the map before the counts are read; never where processes agree on each call."""
        if self.lookahead is None or self.agree is not None or not self.all_active:
            return False
        return self.lookahead(self.lowest, self.stopping)

    def propose(self, fz: Tensor) -> tuple[Tensor, Any]:
        """Return the solver's next point and state."""
        z, valid = self.state.z, self.state.valid

        def call_elements(z_EF: Tensor) -> Tensor:
            return self.elements(self.call(z_EF.reshape(z.shape), valid))

        z_EF, fz_EF = self.elements(z), self.elements(fz)
        returned = self.solver.update(z_EF, fz_EF, self.state.solver, call_elements)
        proposed, solver_state = point_and_state(self.solver, returned)
        check_next_point(self.solver, proposed, z_EF, fz_EF)
        return proposed.reshape(z.shape), solver_state

    def count(self, improved: Tensor, row_counts: Tensor | None) -> tuple[int, int, bool]:
        """Return the number of active elements and of their rows, and whether all elements improved.

        The only device-to-host copy of an iteration.
        """
        active = self.state.status.active
        if row_counts is not None:
            going, better, lowest = self.read(row_counts)
            self.lowest.append(min(lowest))
        else:
            # Inactive elements do not improve, so where there are some only active ones need counting.
            flags = torch.stack((active, improved)) if self.all_active else active
            counts = self.read(flags.sum(list(range(1 + self.all_active, flags.ndim))))
            going, better = counts if self.all_active else (counts, [0])
        return int(sum(going)), sum(map(bool, going)), sum(better) == improved.numel()

    def read(self, values: Tensor) -> Any:
        """Return a tensor's entries as lists on the host."""
        return values.tolist() if self.reader is None else self.reader.read(values)

    def keep_best(self, value: Tensor, improved: Tensor | None) -> None:
        """Keep the value of elements that improved; None: of all."""
        # torch.where, never arithmetic with the mask: a NaN in what is discarded must not spread
        best = value if improved is None else torch.where(improved, value, self.state.best)
        self.state = self.state._replace(best=best)

    def ends(self, done: bool) -> bool:
        """Whether the loop ends, given whether no element of this process is active."""
        return done if self.agree is None else self.agree(done)

    def freeze(self, z: Tensor, solver_state: Any) -> State:
        """Return the state in which active elements move to ``z`` and the others keep their best value."""
        active = self.state.status.active

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(active.view(-1, *[1] * (new.ndim - 1)), new, old)

        try:
            solver_state = pytree.tree_map(choose, solver_state, self.state.solver)
        except (ValueError, RuntimeError):  # its layout may have changed after the first update
            check_updated_state(self.solver, solver_state, self.state.solver, active.numel())
            raise
        return self.state._replace(z=torch.where(active, z, self.state.best), solver=solver_state)

    # ------------------------------------------------------------------------------------ the working set

    def shrink(self, remaining: int, rows: int) -> Tensor | None:
        """Let rows and tokens that are done leave the working set, where that pays.

        Returns the indices of the rows that stay, or None if all do.

        Args:
            remaining: number of active elements.
            rows: number of rows that have any.

        """
        index, size, full_size = None, self.state.z.shape[0], self.z0.shape[0]
        if (
            self.compaction is not None
            and self.compaction.pays(rows, size=size, full_size=full_size)
            and isinstance(self.f, RowMap)
        ):
            index = self.compaction.rows(self.state.status.active, rows, full_size=full_size)
            self.results = FullResults.of(self.state, self.results, self.trace)
            self.results.rows = self.results.rows[index]
            self.state = take_rows(self.state, index)
            self.f = self.f.select_rows(index)
            self.exit = self.exit and self.exit.restrict("select_rows", index)
        if self.commit is not None and isinstance(self.f, SequenceMap):
            tokens = self.commit.tokens(self.state.status.active, remaining, self.read)
            if tokens:
                self.results = FullResults.of(self.state, self.results, self.trace)
                self.results.first += tokens
                prefix = self.state.best[:, :tokens].unflatten(-1, self.z0.shape[2:])
                self.f = self.f.after(prefix)
                self.exit = self.exit and self.exit.restrict("after", prefix)
                self.state = drop_prefix(self.state, tokens)
        self.all_active = remaining == self.state.status.active.numel()
        return index


def flatten_features(z: Tensor, leading: int) -> Tensor:
    """Return ``z`` (B, …) as points, with one dimension of features after the ``leading`` ones."""
    return z if z.ndim == leading + 1 else z.reshape(*z.shape[:leading], -1)


def still_at_padding(fz: Tensor, z: Tensor, valid_BL: Tensor | None) -> Tensor:
    """Return ``f(z)``, and ``z`` itself at padding; both (B, L, …).

    A solver that mixes whole rows, as Anderson does, would otherwise weigh the padding's steps.
    """
    if valid_BL is None:
        return fz
    return torch.where(valid_BL.view(*valid_BL.shape, *[1] * (z.ndim - 2)), fz, z)


# ------------------------------------------------------------------------------------ checks of the solver
# They look at shapes and types only, which are known without waiting for a device.


def check_solver_state(solver: Solver, state: Any, elements: int) -> None:
    """Check that every leaf of a solver's state is a tensor (E, …).

    Raises:
        ContractError: another kind of leaf, or another first dimension.

    """
    for leaf in pytree.tree_leaves(state):
        fits = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == elements
        if not fits:  # the description below is costly
            require(
                False,
                solver,
                "state layout",
                f"its state contains {described(leaf)}, but the search has {elements} elements; every leaf, "
                "counters included, must be a tensor with the elements as first dimension",
            )


def check_updated_state(solver: Solver, state: Any, before: Any, elements: int) -> None:
    """Check that an update keeps the state's structure, shapes and types.

    Raises:
        ContractError: one of them has changed.

    """
    check_solver_state(solver, state, elements)
    (old, old_form), (new, new_form) = pytree.tree_flatten(before), pytree.tree_flatten(state)
    same = old_form == new_form
    if not same or any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(old, new, strict=True)):
        was, now = (", ".join(map(described, leaves)) or "nothing" for leaves in (old, new))
        require(
            False,
            solver,
            "state layout",
            f"update received a state of {was} and returned a state of {now}; structure, shapes and types "
            "must stay the same, so keep past points in tensors of fixed size that init creates",
        )


def point_and_state(solver: Solver, returned: Any) -> tuple[Any, Any]:
    """Return the next point and the state that an update returned.

    Raises:
        ContractError: it did not return a tuple of two; a tensor would be unpacked by its rows.

    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        require(
            False,
            solver,
            "next point",
            f"update returned {described(returned)}; return a tuple of the next point and the state: z, "
            "state",
        )
    z, state = returned
    return z, state


def check_next_point(solver: Solver, proposed: Any, z_EF: Tensor, fz_EF: Tensor) -> None:
    """Check that the point that a solver proposes has the shape (E, F) and type of the one before.

    Raises:
        ContractError: it has not.
        ValueError: it has not, because the value of the map has another type.

    """
    if not isinstance(proposed, Tensor) or proposed.shape != z_EF.shape or proposed.dtype != z_EF.dtype:
        if fz_EF.dtype != z_EF.dtype:
            who = "the map (in a model its mixers, MLPs, scalings and injection)"
            raise ValueError(f"{who} returned {fz_EF.dtype} for points of {z_EF.dtype}; return the same type")
        require(
            False,
            solver,
            "next point",
            f"update returned {described(proposed)} for a point that is {described(z_EF)}; they must agree",
        )
