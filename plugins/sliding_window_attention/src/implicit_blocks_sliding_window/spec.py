"""The spec of the mixer and its costs. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import AttentionSpec, MixerSpec


class SlidingWindowAttentionSpec(MixerSpec):
    """Causal attention to the last `window` tokens, with rotary positions and grouped heads."""

    kind: Literal["sliding_window_attention"] = "sliding_window_attention"
    window: PositiveInt
    """Number of tokens that a token attends to: itself and the `window - 1` before it."""
    n_heads: PositiveInt
    """Number of query heads; divides d_model into heads of even width."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads; null: n_heads."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary wavelengths."""

    @property
    def unlimited(self) -> AttentionSpec:
        """The spec of full attention with the same heads and projections."""
        return AttentionSpec(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, rope_theta=self.rope_theta)

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        _ = self.unlimited  # its validation reports fields that do not fit
        return self

    def check(self, d_model: int) -> None:
        """Check that `n_heads` divides the width into heads of even width."""
        self.unlimited.check(d_model)

    def injection_width(self, d_model: int) -> int:
        """Return the total width of queries, keys and values."""
        return self.unlimited.injection_width(d_model)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the parameter shapes of full attention."""
        return self.unlimited.parameter_shapes(d_model)

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count projections, and scores and sums over the keys that a token attends to.

        Token t of `length` attends to min(t, window) keys; the mean is used. Masked entries of the blocks are
        not counted, as for causal attention.
        """
        projections = 2 * d_model * (self.injection_width(d_model) + d_model)
        growing = min(length, self.window)
        keys = (growing * (growing + 1) / 2 + (length - growing) * self.window) / length
        return float(projections + 4 * d_model * keys)
