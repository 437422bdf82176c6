"""Residual scalings: the residual stream after a branch, given both.

Shape legend: B batch, L tokens of a window, D model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from implicit_blocks.scalings import BoundedGateSpec, DeepNormSpec, LayerScaleSpec
from implicit_blocks.specs import ScalingSpec

__all__ = ["BoundedGate", "BranchFactor", "DeepNorm", "LayerScale", "PlainSum", "Scaling"]


class Scaling(nn.Module, ABC):
    """Base of the residual scalings. Parameters are vectors, so that weight decay excludes them.

    Args:
        spec: the kind's spec.
        d_model: width D of the stream.
        n_layers: number of layers of the stack.

    """

    def __init__(self, spec: ScalingSpec, *, d_model: int, n_layers: int) -> None:
        super().__init__()
        self.spec = spec
        self.d_model = d_model
        self.n_layers = n_layers

    @abstractmethod
    def forward(self, stream_BLD: Tensor, branch_BLD: Tensor) -> Tensor:
        """Return the stream after the branch, (B, L, D); each token is computed separately."""

    def extra_repr(self) -> str:
        """Return the spec's fields and the width."""
        return f"{self.spec!r}, d_model={self.d_model}"


class PlainSum(Scaling):
    """``stream + branch``; where a spec is ``plain``, a layer can add both itself instead."""

    def forward(self, stream_BLD: Tensor, branch_BLD: Tensor) -> Tensor:
        """Return the sum, (B, L, D)."""
        return stream_BLD + branch_BLD


class BranchFactor(Scaling):
    """Base of ``stream + γ branch``, whose factor kernels of decoding multiply into the branch's weights."""

    @property
    @abstractmethod
    def factor(self) -> Tensor:
        """The factor γ of each channel, (D,)."""

    def forward(self, stream_BLD: Tensor, branch_BLD: Tensor) -> Tensor:
        """Return the stream after the scaled branch, (B, L, D)."""
        return stream_BLD + self.factor * branch_BLD


class LayerScale(BranchFactor):
    """``stream + γ branch`` with the parameter ``gamma`` (D,): H. Touvron et al., CaiT, 2021, eq. 2."""

    spec: LayerScaleSpec

    def __init__(self, spec: LayerScaleSpec, *, d_model: int, n_layers: int) -> None:
        super().__init__(spec, d_model=d_model, n_layers=n_layers)
        self.gamma = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set γ to ``init``."""
        nn.init.constant_(self.gamma, self.spec.init)

    @property
    def factor(self) -> Tensor:
        """The parameter γ, (D,)."""
        return self.gamma


class BoundedGate(BranchFactor):
    """``stream + γ branch``, ``γ = maximum · σ(raw_gamma)``, with the parameter ``raw_gamma`` (D,).

    Attractor, 2026 (arXiv 2605.12466): the bound limits how far the branches of the core can expand. Its
    gradient vanishes where γ is near 0 or the bound.
    """

    spec: BoundedGateSpec

    def __init__(self, spec: BoundedGateSpec, *, d_model: int, n_layers: int) -> None:
        super().__init__(spec, d_model=d_model, n_layers=n_layers)
        self.raw_gamma = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the raw value such that γ is ``init``."""
        init, maximum = self.spec.init, self.spec.maximum
        nn.init.constant_(self.raw_gamma, math.log(init) - math.log(maximum - init))

    @property
    def factor(self) -> Tensor:
        """The gate, (D,)."""
        return self.spec.maximum * self.raw_gamma.sigmoid()


class DeepNorm(Scaling):
    """``α stream + branch``: H. Wang et al., "DeepNet: scaling transformers to 1,000 layers", 2022.

    It belongs to post-norm layers, ``norm(α x + f(x))``. Without a norm after the sum the stream grows by α
    with every branch.
    """

    spec: DeepNormSpec

    def __init__(self, spec: DeepNormSpec, *, d_model: int, n_layers: int) -> None:
        super().__init__(spec, d_model=d_model, n_layers=n_layers)
        self.alpha = spec.factor(n_layers)

    def forward(self, stream_BLD: Tensor, branch_BLD: Tensor) -> Tensor:
        """Return the scaled stream after the branch, (B, L, D)."""
        return self.alpha * stream_BLD + branch_BLD
