"""Injections without matrices: none, addition, Attractor's, and the residual fixed point.

Shape legend: B batch, L tokens, D model width, C core width; both are equal here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from implicit_blocks.injections import ResidualSpec
from implicit_blocks.injections.base import Injection
from implicit_blocks.specs.families import InjectionSpec


class _SameWidth(Injection):
    """Base of the injections that add the prelude's output to the state.

    Args:
        spec: the kind's spec.
        d_model: D.
        core_width: C, equal to D.

    """

    def __init__(
        self,
        spec: InjectionSpec,
        *,
        d_model: int,
        core_width: int,
        **_: object,
    ) -> None:
        super().__init__()
        spec.check(d_model, core_width)


class NoInjection(_SameWidth):
    """The map is the core itself; the prelude's output is only its start."""

    direct: ClassVar[bool] = True

    def source(self, x_BLD: Tensor) -> None:
        """Return None: nothing is injected."""

    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``z``."""
        return z_BLC


class AddInjection(_SameWidth):
    """``z ← core(z + e)``."""

    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``z + e``."""
        assert e is not None
        return z_BLC + e


class Attractor(AddInjection):
    """``z ← core(z + e) − z``: with ``core(u) = u + Δ(u)`` the map is ``e + Δ(z + e)``."""

    def leave(self, h_BLC: Tensor, z_BLC: Tensor, entered_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``h − z``."""
        return h_BLC - z_BLC


class Residual(_SameWidth):
    """``z ← e + Δ(u)`` with ``core(u) = u + Δ(u)`` and ``u = z``; with a gate g ``u = e + g ⊙ (z − e)``.

    Args:
        spec: the gate's initial value, and the damping.
        d_model: D.
        core_width: C, equal to D.

    """

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        d_model: int,
        core_width: int,
        **_: object,
    ) -> None:
        super().__init__(spec, d_model=d_model, core_width=core_width)
        self.gate_init, self.damping = spec.gate_init, spec.damping
        self.gate = None if spec.gate_init is None else nn.Parameter(torch.empty(core_width))
        self.reset_parameters()

    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``z``, or between ``e`` and ``z`` as the gate says."""
        assert e is not None
        return z_BLC if self.gate is None else torch.lerp(e, z_BLC, self.gate.to(z_BLC.dtype))

    def leave(self, h_BLC: Tensor, z_BLC: Tensor, entered_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``e + (h − u)``, or with damping a point between ``z`` and it."""
        assert e is not None
        value_BLC = e + (h_BLC - entered_BLC)
        return (
            value_BLC if self.damping == 1 else torch.lerp(z_BLC.to(value_BLC.dtype), value_BLC, self.damping)
        )

    def reset_parameters(self) -> None:
        """Set the gate to its initial value."""
        if self.gate is not None and self.gate_init is not None:
            nn.init.constant_(self.gate, self.gate_init)
