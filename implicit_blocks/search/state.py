"""The working set of a search.

Shape legend: B rows, T tokens, E elements (B rows, or B · T tokens with prefix scope), F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from implicit_blocks.search.status import Status


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
