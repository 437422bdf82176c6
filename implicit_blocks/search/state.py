"""The working set of a search, and the results of all rows and tokens once some have left it.

Shape legend: B rows, T tokens, E elements (B rows, or B · T tokens with prefix scope), F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.search.status import Status


class State(NamedTuple):
    """The tensors of the working set, all of which lead with its rows, except the solver's."""

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
    """(B, 1, 1), the largest residual of the tokens that have left."""

    def take_rows(self, index: Tensor) -> State:
        """Return the state of the rows with these indices, (R,) int64."""
        return self._cut(lambda rows: rows[index])

    def drop_prefix(self, tokens: int) -> State:
        """Return the state without the first ``tokens`` tokens; their largest residual is kept."""
        largest = self.status.last_residual[:, :tokens].amax(1, keepdim=True)  # NaN or Inf after divergence
        if self.prefix_residual is not None:
            largest = torch.maximum(largest, self.prefix_residual)
        rest = self._replace(prefix_residual=None)._cut(lambda rows: rows[:, tokens:].contiguous())
        return rest._replace(prefix_residual=largest)

    def _cut(self, cut: Callable[[Tensor], Tensor]) -> State:
        leading = self.z.shape[:-1]

        def cut_elements(leaf: Tensor) -> Tensor:
            return cut(leaf.unflatten(0, leading)).flatten(0, len(leading) - 1)

        solver = pytree.tree_map_only(Tensor, cut_elements, self.solver)
        rest: State = pytree.tree_map_only(Tensor, cut, self._replace(solver=None))
        return rest._replace(solver=solver)


class FullResults:
    """The results of all rows and tokens, once some have left the working set."""

    def __init__(self, state: State) -> None:
        self.rows = torch.arange(state.z.shape[0], device=state.z.device)
        """Which row each row of the working set is."""
        self.first = 0
        """The first token of the working set."""
        self.best, self.status = pytree.tree_map(torch.clone, (state.best, state.status))

    def write(self, state: State) -> None:
        """Write the results of the working set to their places."""
        new = pytree.tree_leaves((state.best, state.status))
        for whole, part in zip(pytree.tree_leaves((self.best, self.status)), new, strict=True):
            whole[self._place()] = part

    def expand(self, residual: Tensor) -> Tensor:
        """Return residuals of the working set as residuals of everything, NaN elsewhere."""
        whole = residual.new_full(self.status.last_residual.shape, torch.nan)
        whole[self._place()] = residual
        return whole

    def _place(self) -> Any:
        return (self.rows, slice(self.first, None)) if self.first else self.rows
