"""The working set of a search: its tensors, and how rows and tokens that are done leave it.

Shape legend: B rows, T tokens, E elements (B rows, or B · T tokens with prefix scope), F features, R rows
that stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.search.status import Status
from implicit_blocks.search.trace import Trace


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
