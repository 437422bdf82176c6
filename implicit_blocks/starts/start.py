"""Initial states of the loop: the point ``z0`` at which the search or the loop of the core begins.

Noise as initial state: J. Geiping et al., "Scaling up test-time compute with latent reasoning", 2025
(Huginn), and path independence: C. Anil et al., "Path independent equilibrium models", 2022.

Shape legend: B batch, L tokens of a window, D width of the embedding, W width of the core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from implicit_blocks.ops.noise import hash_counters, normal_at, sampled_normal
from implicit_blocks.specs import StartSpec
from implicit_blocks.starts import LearnedStartSpec, NormalStartSpec

__all__ = ["EmbeddingStart", "LearnedStart", "NormalStart", "PreludeStart", "Start", "ZeroStart"]

STATE, ADDED = 0, 1  # streams of noise: the initial state itself, and the noise added to it


class Start(nn.Module, ABC):
    """Base of the initial states: a kind defines ``point``; the noise that all kinds share is added here.

    In training noise comes from torch's global generator of the device. In evaluation it is a function of the
    spec's seed, the token's position and the channel, so that windows, cached decoding and slots begin at the
    same point as one pass over the sequence, and rows do not influence each other.

    Args:
        spec: the kind's spec.
        width: width W of the core.

    """

    def __init__(self, spec: StartSpec, *, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.width = width

    def forward(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, width: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the initial state, (B, L, W).

        Args:
            x_BLD: the embedded tokens.
            e_BLD: the prelude's output, as the injection reads it; None where the model has none.
            positions_BL: positions of the tokens in their sequences, (1 or B, L) int64.
            width: width W of the core.
            dtype: type of the result.

        Raises:
            ValueError: a width is not that of the core; names both.

        """
        if width != self.width:
            raise ValueError(
                f"the initial state {self.spec.kind!r} was built for width {self.width}, but the core has "
                f"width {width}; build it with width={width}"
            )
        z_BLW = self.point(x_BLD=x_BLD, e_BLD=e_BLD, positions_BL=positions_BL, dtype=dtype)
        if self.spec.noise_std == 0:
            return z_BLW
        noise = self.noise(ADDED, positions_BL, x_BLD.shape[0], dtype=dtype)
        return z_BLW + self.spec.noise_std * noise

    @abstractmethod
    def point(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the initial state without the added noise, (B, L, W); the arguments are those of forward."""

    def noise(
        self,
        stream: int,
        positions_BL: Tensor,
        batch_size: int,
        *,
        dtype: torch.dtype,
        truncation: float | None = None,
    ) -> Tensor:
        """Return normal noise (B, L, W) of standard deviation 1 before truncation.

        Args:
            stream: number of the stream; the noise of two streams is independent.
            positions_BL: positions of the tokens, (1 or B, L) int64.
            batch_size: number of rows B.
            dtype: type of the noise.
            truncation: largest absolute value; None: unbounded.

        """
        shape = (batch_size, positions_BL.shape[1], self.width)
        if self.training:
            return sampled_normal(shape, truncation=truncation, dtype=dtype, device=positions_BL.device)
        seed = hash_counters(self.spec.seed, stream)
        noise = normal_at(positions_BL, self.width, seed=seed, truncation=truncation, dtype=dtype)
        return noise.expand(shape)

    def extra_repr(self) -> str:
        """Return the spec's fields and the width."""
        return f"{self.spec!r}, width={self.width}"


class ZeroStart(Start):
    """Zeros."""

    def point(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return zeros, (B, L, W)."""
        return torch.zeros((*x_BLD.shape[:2], self.width), dtype=dtype, device=x_BLD.device)


class EmbeddingStart(Start):
    """The embedded tokens; the core has their width."""

    def point(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the embedded tokens, (B, L, W)."""
        return _of_core_width(x_BLD, "x_BLD, the embedded tokens,", self.width).to(dtype)


class PreludeStart(Start):
    """The prelude's output, as the injection reads it; the core has its width."""

    def point(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the prelude's output, (B, L, W).

        Raises:
            ValueError: the model has no such output.

        """
        if e_BLD is None:
            raise ValueError(
                "initial state 'prelude' needs the prelude's output, but e_BLD is None; pass it or choose "
                "another initial state, such as embedding"
            )
        return _of_core_width(e_BLD, "e_BLD, the prelude's output,", self.width).to(dtype)


class NormalStart(Start):
    """Normal noise of standard deviation ``std``, truncated at ``truncation`` standard deviations.

    The variance of truncated noise is lower; it is not rescaled, as in Huginn and Parcae (both: truncation
    3, which gives 0.987 ``std``).
    """

    spec: NormalStartSpec

    def point(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the noise, (B, L, W)."""
        truncation = self.spec.truncation
        noise = self.noise(STATE, positions_BL, x_BLD.shape[0], dtype=dtype, truncation=truncation)
        return self.spec.std * noise


class LearnedStart(Start):
    """A learned vector ``value`` (W,), the same for every token."""

    spec: LearnedStartSpec

    def __init__(self, spec: LearnedStartSpec, *, width: int) -> None:
        super().__init__(spec, width=width)
        self.value = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the vector to zeros, or to normal values of standard deviation ``init_std``."""
        if self.spec.init_std == 0:
            nn.init.zeros_(self.value)
        else:
            nn.init.normal_(self.value, std=self.spec.init_std)

    def point(
        self, *, x_BLD: Tensor, e_BLD: Tensor | None, positions_BL: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the vector at every token, (B, L, W)."""
        return self.value.to(dtype).repeat(*x_BLD.shape[:2], 1)


def _of_core_width(tensor: Tensor, name: str, width: int) -> Tensor:
    if tensor.shape[-1] != width:
        raise ValueError(
            f"{name} has width {tensor.shape[-1]}, but the core has width {width}; choose another initial "
            "state, such as zeros or normal, or equal widths"
        )
    return tensor
