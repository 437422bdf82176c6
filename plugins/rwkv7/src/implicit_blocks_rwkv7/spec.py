"""The spec of the mixer and its costs. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from implicit_blocks.specs import MixerSpec


class RWKV7Spec(MixerSpec):
    """RWKV-7's time mixing: B. Peng et al., "RWKV-7 'Goose'", 2025."""

    kind: Literal["rwkv7"] = "rwkv7"
    n_heads: PositiveInt
    """Number of heads; each has its own state."""
    head_dim: PositiveInt
    """Width K of a head: its state has K · K numbers."""
    decay_rank: PositiveInt = 32
    """Hidden width of the low-rank map for the decays."""
    rate_rank: PositiveInt = 32
    """Hidden width of the low-rank map for the in-context learning rates."""
    gate_rank: PositiveInt = 64
    """Hidden width of the low-rank map for the output gate."""
    negative_eigenvalues: bool = False
    """Allow corrections by up to twice the old answer, so that the state can be reflected."""
    chunk_size: Annotated[int, Field(ge=1, le=64)] = 32
    """Tokens per chunk of the plain scan: affects speed, not values."""
    norm_eps: PositiveFloat = 1e-5
    """Added, times head_dim, to the variance in each head's norm, as published; narrow heads need more."""
    backend: Literal["auto", "triton", "fla", "plain"] = "auto"
    """`plain`: PyTorch, any device. `triton`: the plugin's kernels, for heads of 16 or 32 on a GPU,
    without packed documents. `fla`: flash-linear-attention's, for 16-bit floats, any width and long rows.
    `auto`: `triton` where it supports the inputs, else `plain`."""

    @property
    def inner_width(self) -> int:
        """Total width of all heads."""
        return self.n_heads * self.head_dim

    @property
    def ranks(self) -> int:
        """Total hidden width of the three low-rank maps."""
        return self.decay_rank + self.rate_rank + self.gate_rank

    def injection_width(self, d_model: int) -> int:
        """Return the width of receptance, key, value, and the hidden layers of the three low-rank maps."""
        return 3 * self.inner_width + self.ranks

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of token shift, projections, low-rank maps and seven vectors of inner width."""
        inner = self.inner_width
        ranks = {"decay": self.decay_rank, "rate": self.rate_rank, "gate": self.gate_rank}
        widths = {"r": inner, "k": inner, "v": inner, **ranks}
        vectors = ("w_0", "a_0", "xi", "alpha", "rho", "norm_weight", "norm_bias")
        return {
            **{f"shift.{name}": (d_model,) for name in widths},
            **{f"projections.{name}.weight": (width, d_model) for name, width in widths.items()},
            **{f"{name}_up.weight": (inner, rank) for name, rank in ranks.items()},
            **dict.fromkeys(vectors, (inner,)),
            "out_proj.weight": (d_model, inner),
        }

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count projections, low-rank maps, and the chunked scan.

        In a chunk of Q tokens the scan computes four Q × Q products of K-wide vectors, solves a triangular
        system with 2 K right-hand sides, and applies three Q × Q to the values; per token, the state (K · K)
        is read twice and written twice.
        """
        chunk, head = min(self.chunk_size, length), self.head_dim
        inner = self.inner_width
        projections = 2 * (d_model * (4 * inner + self.ranks) + self.ranks * inner)
        return float(projections + self.n_heads * (16 * chunk * head + 8 * head * head))
