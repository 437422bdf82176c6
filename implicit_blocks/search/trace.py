"""What a search keeps of its course: the residual of every call, and chosen iterates.

Shape legend: B rows, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_blocks.solution import narrow
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import require_count

if TYPE_CHECKING:
    from implicit_blocks.search.state import FullResults


class Trace:
    """Collects residuals; NaN marks elements that were not active.

    Args:
        precision: of the trace.

    """

    def __init__(self, precision: torch.dtype) -> None:
        self.precision = precision
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._parts: list[Tensor] = []

    def add(self, residual: Tensor, active: Tensor) -> None:
        """Add the residuals of a call, and which elements took part in it; no operator is called yet."""
        self._pending.append((residual, active))

    def flush(self, expand: Callable[[Tensor], Tensor] | None) -> None:
        """Process the residuals added since the last time, all of one shape.

        ``expand`` returns residuals of the working set as residuals of everything; None where they are that.
        """
        if not self._pending:
            return
        residuals, active = (torch.stack(parts) for parts in zip(*self._pending, strict=True))
        self._pending = []
        parts = narrow(residuals, self.precision).masked_fill_(~active, torch.nan)
        self._parts += parts if expand is None else map(expand, parts)

    def stack(self) -> Tensor:
        """Return the residuals of all calls, (iterations, B) or (iterations, B, T), the last ones of all."""
        self.flush(None)
        return torch.stack(self._parts).squeeze(-1)


class Trajectory:
    """Keeps the points after chosen calls of the map, and no others.

    The point after call t is the solver's next point; an element that has left has its returned value, also
    after the end of the search.

    Args:
        calls: the numbers t of those calls, from 1; those above the maximum number of calls are left out.
        stopping: the rule of the search.

    Raises:
        ValueError: a number is not an integer of at least 1.

    """

    def __init__(self, calls: Sequence[int], stopping: Stopping) -> None:
        for number in calls:
            require_count("a call of trajectory", number)
        self.calls = sorted({number for number in calls if number <= stopping.max_iterations})
        self._points: dict[int, Tensor] = {}

    def __contains__(self, call: int) -> bool:
        """Whether the point after this call is to be kept."""
        return call in self.calls

    def add(self, call: int, z: Tensor, results: FullResults | None) -> None:
        """Keep the points (B, F) or (B, T, F) after a call, with the results of what has left."""
        self._points[call] = z.clone() if results is None else results.points(z)

    def finish(self, z: Tensor) -> dict[int, Tensor]:
        """Return the points by call, of the shape of the solution ``z``, which those after the end equal."""
        return {
            call: self._points[call].reshape(z.shape) if call in self._points else z for call in self.calls
        }
