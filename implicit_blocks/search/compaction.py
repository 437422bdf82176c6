"""What is known of all rows and tokens of a search, once some of them have left its working set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from implicit_blocks.search.search import _Loop


class FullResults:
    """What is known of all rows and tokens, once some have left the working set."""

    NAMES = ("best", "last_residual", "lowest_residual", "token_residual", "iterations")

    def __init__(self, loop: _Loop) -> None:
        self.rows = torch.arange(loop.shape[0], device=loop.z.device)
        self.first = 0  # the first token that is still in the working set
        self.values = {name: getattr(loop, name).clone() for name in self.NAMES}
        self.trace: list[Tensor] = []

    def write(self, loop: _Loop) -> None:
        """Write the working set into the whole."""
        place = (self.rows, slice(self.first, None)) if self.first else self.rows
        for name, whole in self.values.items():
            whole[place] = getattr(loop, name)
        for part in loop.newly_traced():
            whole = part.new_full(self.values["lowest_residual"].shape, torch.nan)
            whole[place] = part
            self.trace.append(whole)

    def restore(self, loop: _Loop) -> None:
        """Give the whole back to the loop."""
        for name, whole in self.values.items():
            setattr(loop, name, whole)
        loop.trace = self.trace
