"""Injections with matrices in the stream: Huginn's concatenation and Parcae's stable diagonal recurrence.

Shape legend: B batch, L tokens, D model width, C core width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.injections import ConcatSpec, DiagonalSpec
from implicit_blocks.injections.base import Injection
from implicit_blocks.layers import Linear, assign_weight


class Concat(Injection):
    """``z ← core(W [z; e])``: J. Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning", 2025.

    Args:
        spec: whether there is a bias.
        d_model: D.
        core_width: C.

    """

    def __init__(
        self,
        spec: ConcatSpec,
        *,
        d_model: int,
        core_width: int,
        **_: object,
    ) -> None:
        super().__init__()
        self.proj = Linear(core_width + d_model, core_width, bias=spec.bias)

    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``W [z; e]`` in the dtype of ``z``."""
        assert e is not None
        entered: Tensor = self.proj(torch.cat((z_BLC, e.to(z_BLC.dtype)), dim=-1))
        return entered.to(z_BLC.dtype)


class Diagonal(Injection):
    """``z ← core(exp(−Δ·A) ⊙ z + Δ ⊙ B x)`` with ``Δ = softplus(dt_bias)`` and ``A = exp(A_log)`` (Parcae).

    ``B x`` is computed once per token, outside the loop.

    Args:
        spec: the initial decay.
        d_model: D.
        core_width: C.

    """

    def __init__(
        self,
        spec: DiagonalSpec,
        *,
        d_model: int,
        core_width: int,
        **_: object,
    ) -> None:
        super().__init__()
        self.decay = spec.decay
        self.A_log = nn.Parameter(torch.empty(core_width))
        self.dt_bias = nn.Parameter(torch.empty(core_width))
        self.proj = Linear(d_model, core_width, bias=False)
        self.reset_parameters()

    def source(self, x_BLD: Tensor) -> Tensor:
        """Return ``Δ ⊙ B x``, (B, L, C), in the dtype of ``x``."""
        driven: Tensor = self.proj(x_BLD)
        return F.softplus(self.dt_bias).to(x_BLD.dtype) * driven.to(x_BLD.dtype)

    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``exp(−Δ·A) ⊙ z + e``."""
        assert e is not None
        decay = torch.exp(-F.softplus(self.dt_bias) * self.A_log.exp())
        return decay.to(z_BLC.dtype) * z_BLC + e

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set A to 1, Δ to ``−log(decay)``, and B to the identity, cut off or padded with zeros."""
        step = -math.log(self.decay)
        nn.init.zeros_(self.A_log)
        nn.init.constant_(self.dt_bias, step + math.log(-math.expm1(-step)))  # softplus⁻¹(step)
        weight = self.proj.weight
        assign_weight(self.proj, torch.eye(*weight.shape, dtype=weight.dtype, device=weight.device))
