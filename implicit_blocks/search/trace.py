"""The trace of a search: the residual of every call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicit_blocks.ops.residual import narrow


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
        """Return the residuals of all calls, (iterations, B) or (iterations, B, T)."""
        return torch.stack(self._parts).squeeze(-1)
