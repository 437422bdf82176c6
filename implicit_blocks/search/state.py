"""The state of a search: the status of each element, the tensors, and how rows and tokens leave them.

``StatusRule`` is the one rule that measures, freezes and keeps the best. The search loop, the search of
decoding slots and ``Search.report`` share it. With an exit criterion other than the residual
(``implicit_blocks.exits``), its measure takes the place of the residual, except in what is reported as the
residual of the returned value. The rule is written in plain operators here; on a GPU, Triton kernels compute
the same for residuals (``implicit_blocks.ops.kernels.residual`` and ``search_status``).

Shape legend: B rows, T elements per row with prefix scope (its tokens), E elements (B rows, or B · T tokens
with prefix scope), F features, R rows that stay. Points are (B, F) with scope ``sequence`` and (B, T, F) with
``prefix``; a status has 1 in place of F, so that it masks points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.exits.exit import Exit
from implicit_blocks.ops.accelerated import available
from implicit_blocks.search.agreement import Agreement, DividedRows
from implicit_blocks.search.trace import Trace
from implicit_blocks.solution import SMALLEST_SCALE, Solution, difference, narrow, norm, relative_residual
from implicit_blocks.specs import Stopping

# ------------------------------------------------------------------------------------ status


class Status(NamedTuple):
    """What a search knows of each element, (B, 1) or (B, T, 1).

    The *deciding* residual of an element is its own; with prefix scope it is the largest of its own and those
    of the tokens before it in the row. With an exit criterion, ``last_residual`` and ``lowest_residual`` are
    its measures.
    """

    last_residual: Tensor
    """The residual of the last call that the element took part in; not finite if it has diverged."""
    lowest_residual: Tensor
    """The lowest deciding residual so far; the element has converged if it is within the tolerance."""
    token_residual: Tensor
    """The element's own residual in the call with the lowest deciding residual."""
    iterations: Tensor
    """The number of calls that the element took part in, int64."""
    active: Tensor
    """Whether the element takes part in the next call, bool: it has neither converged nor diverged."""
    scale: Tensor
    """The largest ``‖f(z)‖`` so far, at most 1 (``initial_scale``)."""


class Update(NamedTuple):
    """The status after a call."""

    status: Status
    improved: Tensor
    """Where the deciding residual is lower than ever before, bool, of the status's shape."""
    row_counts: Tensor | None
    """(3, B) float32 from the kernel: active and improved elements, lowest deciding residual, per row."""


@dataclass(frozen=True)
class StatusRule:
    """How residuals are measured, and what they decide.

    Args:
        tolerance: an element with a deciding residual, or measure, up to this has converged; in plain
            operators also a tensor, of the status's shape.
        relative: whether residuals are relative to ``‖f(z)‖``.
        scale_limit: upper limit of ``Status.scale``, ().
        prefix: whether elements are tokens, decided by the residuals of the tokens before them too.
        fused: whether to use the Triton kernels: float32 residuals of points on a GPU, without padding.
        of_whole_rows: the norms of rows of which processes have parts (``DividedRows.norms``), or None.

    """

    tolerance: float | Tensor
    relative: bool
    scale_limit: Tensor
    prefix: bool = False
    fused: bool = False
    of_whole_rows: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def start(
        cls,
        stopping: Stopping,
        z: Tensor,
        valid: Tensor | None = None,
        *,
        exit: Exit | None = None,
        agree: Agreement | None = None,
    ) -> tuple[StatusRule, Status]:
        """Return the rule for a search from ``z``, and the status before its first call.

        ``valid`` (B, L) bool is False at padding, which is never active with prefix scope. ``exit`` is the
        criterion whose measures replace the residual, and its threshold the tolerance. ``agree`` may be
        ``DividedRows``: processes then measure whole rows.
        """
        divided = agree if isinstance(agree, DividedRows) else None
        prefix = stopping.scope == "prefix"
        fused = z.is_cuda and z.dtype != torch.float64 and valid is None and available("triton")
        fused = fused and exit is None  # the kernels measure the residual alone, of whole rows
        fused = fused and (divided is None or divided.tokens is None)
        whole = None if divided is None else divided.norms
        tolerance = tolerance_of(stopping, exit)
        shape = (*z.shape[:-1], 1)
        scale, scale_limit = initial_scale(z, shape)
        precision = torch.float32 if fused else scale.dtype
        lowest = z.new_full(shape, torch.inf, dtype=precision)
        status = Status(
            last_residual=z.new_zeros(shape, dtype=precision),
            lowest_residual=lowest,
            token_residual=lowest,
            iterations=z.new_zeros(shape, dtype=torch.int64),
            active=valid[..., None] if prefix and valid is not None else z.new_ones(shape, dtype=torch.bool),
            scale=scale,
        )
        return cls(tolerance, stopping.norm == "relative", scale_limit, prefix, fused, whole), status

    def residuals(
        self, status: Status, z: Tensor, fz: Tensor, *, valid: Tensor | None = None
    ) -> tuple[Tensor, Status]:
        """Return the residual of each element for the value ``fz = f(z)``, and the status with its scale.

        ``valid`` (B, L) bool is False at padding, which enters no norm.
        """
        if self.fused and z.is_contiguous() and fz.is_contiguous():
            from implicit_blocks.ops.kernels.residual import residuals

            residual, scale = residuals(z, fz, scale=status.scale, relative=self.relative)
            if self.of_whole_rows is not None:
                residual = self.of_whole_rows(residual)
            return residual, status._replace(scale=scale)
        step, value = difference(z, fz), fz
        if valid is not None:
            step = _zero_at_padding(step, valid)
            value = value if self.prefix else _zero_at_padding(value, valid)
        precision = status.lowest_residual.dtype
        whole = self.of_whole_rows
        if not self.relative:
            size = norm(step)
            return narrow(size if whole is None else whole(size), precision), status
        residual, scale = relative_residual(step, value, status.scale, self.scale_limit, of_whole_rows=whole)
        return narrow(residual, precision), status._replace(scale=scale)

    def update(
        self,
        status: Status,
        residual: Tensor,
        *,
        measure: Tensor | None = None,
        prefix_residual: Tensor | None = None,
        valid: Tensor | None = None,
        all_active: bool = False,
    ) -> Update:
        """Return the status after a call with these residuals.

        Inactive elements keep their last residual: they do not improve, and they decide on later tokens by
        the residual with which they left. With prefix scope the tokens after a diverged one become inactive,
        since they can no longer converge.

        Args:
            status: before the call.
            residual: of the call, of the status's shape; ignored for inactive elements.
            measure: of an exit criterion, of the same shape, which decides in place of the residual. Measures
                that count calls can be equal: of equal ones the later is the lower.
            prefix_residual: (B, 1, 1), the largest residual, or measure, of tokens that precede the first one
                here.
            valid: (B, L) bool, False at padding, which does not become active with prefix scope.
            all_active: whether ``status.active`` is known to be True everywhere, which saves an operator.

        """
        if self.fused:
            from implicit_blocks.ops.kernels.search_status import updated

            assert isinstance(self.tolerance, float)

            kept, improved, row_counts = updated(
                residual.contiguous(), *status[:5], prefix_residual=prefix_residual, tolerance=self.tolerance
            )
            return Update(Status._make([*kept, status.scale]), improved, row_counts)
        own = residual if measure is None else measure
        last = own if all_active else torch.where(status.active, own, status.last_residual)
        deciding = deciding_residual(last) if self.prefix else last
        if prefix_residual is not None:
            deciding = torch.maximum(deciding, prefix_residual)
        # No inactive element improves: its residual, and those before it, are frozen or not finite.
        if measure is None:
            improved = deciding < status.lowest_residual
        else:
            improved = status.active & (deciding <= status.lowest_residual) & (deciding < torch.inf)
        lowest = torch.fmin(deciding, status.lowest_residual)
        # Neither converged nor diverged, in two operators: inf mod inf is NaN, which is above nothing.
        active = deciding.fmod(torch.inf) > self.tolerance
        if self.prefix and valid is not None:
            active = active & valid[..., None]
        if measure is not None:
            token = torch.where(improved, residual, status.token_residual)
        else:
            token = torch.where(improved, last, status.token_residual) if self.prefix else lowest
        iterations = status.iterations + status.active
        return Update(Status(last, lowest, token, iterations, active, status.scale), improved, None)

    def solution(
        self,
        status: Status,
        z: Tensor,
        *,
        valid: Tensor | None = None,
        trace: Tensor | None = None,
        trajectory: dict[int, Tensor] | None = None,
    ) -> Solution:
        """Return the solution with the value ``z`` (B, …) and this status.

        ``trace`` is (iterations, B) or (iterations, B, T). Padding counts as converged with residual 0.
        """
        converged = status.lowest_residual <= self.tolerance
        residual = narrow(status.token_residual, torch.promote_types(z.dtype, torch.float32))
        if self.prefix and valid is not None:
            padding = ~valid[..., None]
            converged, residual = converged | padding, residual.masked_fill(padding, 0.0)
        make = Solution.of_tokens if self.prefix else Solution
        return make(
            z,
            iterations=status.iterations.squeeze(-1),
            residual=residual.squeeze(-1),
            converged=converged.squeeze(-1),
            diverged=~status.last_residual.isfinite().squeeze(-1),
            trace=trace,
            trajectory=trajectory,
        )


def initial_scale(z: Tensor, count: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the scale of elements before their first call, of shape ``count``, and its upper limit, ().

    The scale of an element is the largest ``‖f(z)‖`` of its search so far, at most 1. The floor of the
    relative residual is proportional to it: with a fixed floor of 1e-9, every search for a solution much
    smaller than that would converge in its first call.
    """
    precision = torch.float32 if z.device.type == "mps" else torch.float64
    return z.new_full(count, SMALLEST_SCALE, dtype=precision), z.new_ones((), dtype=precision)


def deciding_residual(residual: Tensor) -> Tensor:
    """Return the largest of each token's residual and those before it, (B, T, …); NaN after a NaN."""
    return residual.cummax(1).values


def tolerance_of(stopping: Stopping, exit: Exit | None) -> float:
    """Return the residual, or the criterion's measure, up to which an element has converged."""
    return stopping.tolerance if exit is None or exit.threshold is None else exit.threshold


def _zero_at_padding(points: Tensor, valid: Tensor) -> Tensor:
    """Return points with zeros at padding: (B, T, F), or (B, F) whose features are those of L tokens."""
    by_token = points.view(*valid.shape, -1)
    return by_token.masked_fill(~valid[..., None], 0.0).view(points.shape)


# ------------------------------------------------------------------------------------ the working set


class State(NamedTuple):
    """The tensors of the rows and tokens in the search; all lead with the rows, except the components'."""

    z: Tensor
    """The point of the next call, (B, F) with scope ``sequence`` or (B, T, F) with ``prefix``."""
    best: Tensor
    """The value ``f(z)`` with the lowest deciding residual so far, of ``z``'s shape."""
    status: Status
    solver: Any
    """The solver's state: tensors that lead with the elements, (E, …)."""
    averages: tuple[Tensor, Tensor] | None = None
    """Moving averages of the points and of their values, where they are requested."""
    valid: Tensor | None = None
    """(B, L) bool, False at padding."""
    prefix_residual: Tensor | None = None
    """(B, 1, 1), the largest residual, or measure of an exit criterion, of the tokens that have left."""
    exit: Any = ()
    """The exit criterion's state: tensors that lead with the elements, (E, …)."""


@dataclass(frozen=True)
class RowCompaction:
    """Decides when rows that are done leave the working set, and which ones stay.

    Args:
        bucket_sizes: keep batches to at most four sizes (the full one, and its halves down to an eighth), for
            compiled kernels and captured graphs. Rows that are done fill the batch up.

    """

    bucket_sizes: bool

    def pays(self, rows: int, *, size: int, full_size: int) -> bool:
        """Whether dropping rows at least halves the working set.

        Args:
            rows: number of rows with active elements.
            size: number of rows in the working set.
            full_size: number of rows in the batch.

        """
        return rows > 0 and 2 * self._fewest(rows, full_size) <= size

    def rows(self, active: Tensor, count: int, *, full_size: int) -> Tensor:
        """Return the indices of the rows that stay, (R,) int64, in order.

        Args:
            active: which elements are active, (B, 1) or (B, T, 1).
            count: number of rows with active elements.
            full_size: number of rows in the batch.

        """
        going = active.flatten(1).any(1)
        if not self.bucket_sizes:
            return going.nonzero().squeeze(1)
        size, fewest = going.numel(), self._fewest(count, full_size)
        while size // 2 >= fewest:
            size //= 2
        return torch.argsort((~going).to(torch.uint8), stable=True)[:size].sort().values

    def _fewest(self, rows: int, full_size: int) -> int:
        return max(rows, full_size // 8) if self.bucket_sizes else rows


def take_rows(state: State, index: Tensor) -> State:
    """Return the state of the rows with these indices, (R,) int64."""
    return _cut(state, lambda rows: rows[index])


def drop_prefix(state: State, tokens: int) -> State:
    """Return the state without the first ``tokens`` tokens, whose largest residual is kept."""
    largest = state.status.last_residual[:, :tokens].amax(1, keepdim=True)  # NaN or Inf after a divergence
    if state.prefix_residual is not None:
        largest = torch.maximum(largest, state.prefix_residual)
    rest = _cut(state._replace(prefix_residual=None), lambda rows: rows[:, tokens:].contiguous())
    return rest._replace(prefix_residual=largest)


def _cut(state: State, cut: Callable[[Tensor], Tensor]) -> State:
    """Apply ``cut`` to all tensors, with the elements of the components' laid out by row."""
    leading = state.z.shape[:-1]

    def cut_elements(leaf: Tensor) -> Tensor:
        return cut(leaf.unflatten(0, leading)).flatten(0, len(leading) - 1)

    solver, exit_state = pytree.tree_map_only(Tensor, cut_elements, (state.solver, state.exit))
    rest: State = pytree.tree_map_only(Tensor, cut, state._replace(solver=None, exit=None))
    return rest._replace(solver=solver, exit=exit_state)


class FullResults:
    """The results of all rows and tokens, once some have left the working set."""

    def __init__(self, state: State) -> None:
        self.rows = torch.arange(state.z.shape[0], device=state.z.device)
        """The index in the batch of each row of the working set."""
        self.first = 0
        """The first token of the working set."""
        self.best, self.status = pytree.tree_map(torch.clone, (state.best, state.status))

    @classmethod
    def of(cls, state: State, before: FullResults | None, trace: Trace | None) -> FullResults:
        """Return the results after those of ``before``, with the working set's and its trace's."""
        results = before if before is not None else cls(state)
        results.write(state)
        if trace is not None:
            trace.flush(results.expand)
        return results

    def write(self, state: State) -> None:
        """Write the results of the working set to their places."""
        new = pytree.tree_leaves((state.best, state.status))
        for whole, part in zip(pytree.tree_leaves((self.best, self.status)), new, strict=True):
            whole[self._place()] = part

    def points(self, z: Tensor) -> Tensor:
        """Return points of the working set as points of everything: the results of what has left."""
        whole: Tensor = self.best.clone()
        whole[self._place()] = z
        return whole

    def expand(self, residual: Tensor) -> Tensor:
        """Return residuals of the working set as residuals of everything, NaN elsewhere."""
        whole = residual.new_full(self.status.last_residual.shape, torch.nan)
        whole[self._place()] = residual
        return whole

    def _place(self) -> Any:
        return (self.rows, slice(self.first, None)) if self.first else self.rows
