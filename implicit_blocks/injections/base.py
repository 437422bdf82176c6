"""``Injection``: the two ends of the iterated core, position by position.

Shape legend: B batch, L tokens, D model width, C core width, U width of the mixers' input projections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn


class Injection(nn.Module, ABC):
    """Feeds the prelude's output ``e`` to the core: ``u = enter(z, e)``; ``z ← leave(core(u), z, u, e)``.

    Each function acts on every position separately, so that causality, windows and batch rows are untouched.
    Built as ``build(spec, d_model=D, core_width=C, projected=U, norm_eps=…)``, also on the meta device.
    """

    direct: ClassVar[bool] = False
    """Whether ``enter`` returns ``z`` and ``leave`` the core's output, unchanged: the map is the core."""

    def source(self, x_BLD: Tensor) -> Tensor | None:
        """Return ``e``, (B, L, ·), given the prelude's output; computed once, outside the loop.

        None where ``enter`` and ``leave`` need nothing.
        """
        return x_BLD

    def projected(self, x_BLD: Tensor) -> Tensor | None:
        """Return the term that every mixer adds to its input projection, (B, L, U), or None."""
        return None

    @abstractmethod
    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return the core's input, (B, L, C)."""

    def leave(self, h_BLC: Tensor, z_BLC: Tensor, entered_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return the map's value, (B, L, C), given the core's output ``h`` for the input ``entered``.

        It is ``h`` unless a subclass defines another one.
        """
        return h_BLC
