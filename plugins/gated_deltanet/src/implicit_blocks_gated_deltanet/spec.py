"""The spec of the mixer and its costs. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import MixerSpec, field_error


class GatedDeltaNetSpec(MixerSpec):
    """Gated DeltaNet: S. Yang, J. Kautz & A. Hatamizadeh, "Gated Delta Networks", ICLR 2025."""

    kind: Literal["gated_deltanet"] = "gated_deltanet"
    n_heads: PositiveInt
    """Number of heads; each has its own state."""
    head_dim: PositiveInt
    """Width K of a head's queries and keys."""
    expand_v: PositiveInt = 2
    """Width V of a head's values, as a multiple of head_dim: a head's state has K · V numbers."""
    negative_eigenvalues: bool = False
    """Allow β up to 2 instead of 1, for reflections of the state, which tracking permutations requires."""
    d_conv: PositiveInt = 4
    """Width of the causal convolution over queries, keys and values."""
    conv_bias: bool = False
    """Whether the convolution has a bias."""
    bias: bool = False
    """Whether the input and output projections have biases."""
    chunk_size: PositiveInt = 64
    """Tokens per chunk of the plain scan: affects speed, not values."""
    a_min: PositiveFloat = 1.0
    """Minimum of the initial decay rates, drawn uniformly."""
    a_max: PositiveFloat = 16.0
    """Maximum of the initial decay rates."""
    dt_min: PositiveFloat = 1e-3
    """Minimum of the initial time steps, drawn log-uniformly."""
    dt_max: PositiveFloat = 1e-1
    """Maximum of the initial time steps."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in the norm of each head."""
    backend: Literal["plain", "fla"] = "plain"
    """`plain`: PyTorch, any device. `fla`: flash-linear-attention's kernels, for 16-bit floats on a GPU."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for low, high in (("dt_min", "dt_max"), ("a_min", "a_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise field_error(f"{low} {least} is above {high} {most}; swap them", low, value=least)
        return self

    @property
    def key_width(self) -> int:
        """Total width of the keys of all heads."""
        return self.n_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Total width of the values of all heads."""
        return self.expand_v * self.key_width

    def injection_width(self, d_model: int) -> int:
        """Return the width of gate, queries, keys, values, and the two gates β and α of each head."""
        return 2 * self.value_width + 2 * self.key_width + 2 * self.n_heads

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of both projections, the convolution, A and dt_bias, and the heads' norm."""
        projected, convolved = self.injection_width(d_model), self.value_width + 2 * self.key_width
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (projected, d_model),
            "conv.weight": (convolved, self.d_conv),
            "A_log": (self.n_heads,),
            "dt_bias": (self.n_heads,),
            "norm.weight": (self.expand_v * self.head_dim,),
            "out_proj.weight": (d_model, self.value_width),
        }
        biases = {"in_proj.bias": (projected,), "out_proj.bias": (d_model,)} if self.bias else {}
        return shapes | biases | ({"conv.bias": (convolved,)} if self.conv_bias else {})

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count projections, convolution, and the chunked scan.

        In a chunk of Q tokens the scan computes two Q × Q products of K-wide keys and queries, solves a
        triangular system with K + V right-hand sides, and applies Q × Q to the values; per token, the state
        (K · V) is read twice and written once.
        """
        chunk = min(self.chunk_size, length)
        projections = 2 * d_model * (self.injection_width(d_model) + self.value_width)
        convolution = 2 * self.d_conv * (self.value_width + 2 * self.key_width)
        key, value = self.head_dim, self.expand_v * self.head_dim
        within = 4 * chunk * key + chunk * (key + value) + 2 * chunk * value
        return float(projections + convolution + self.n_heads * (within + 6 * key * value))
