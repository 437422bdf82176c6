"""What a YAML file says of the mixer, and what the mixer costs. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import AttentionSpec, MixerSpec


class SlidingWindowAttentionSpec(MixerSpec):
    """Causal attention to the last `window` tokens, with rotary positions and grouped heads."""

    kind: Literal["sliding_window_attention"] = "sliding_window_attention"
    window: PositiveInt
    """Tokens that a token sees: itself and the `window - 1` before it."""
    n_heads: PositiveInt
    """Query heads; divide d_model into heads of an even width."""
    n_kv_heads: PositiveInt | None = None
    """Key and value heads, each shared by n_heads / n_kv_heads query heads; null: as many as query heads."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary wavelengths."""

    @property
    def unlimited(self) -> AttentionSpec:
        """The same attention without the limit: heads and projections are alike."""
        return AttentionSpec(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, rope_theta=self.rope_theta)

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        _ = self.unlimited  # its own validation says what doesn't divide what, and where
        return self

    def check(self, d_model: int) -> None:
        """`n_heads` must divide the width into even heads."""
        self.unlimited.check(d_model)

    def injection_width(self, d_model: int) -> int:
        """Return the width of queries, keys and values."""
        return self.unlimited.injection_width(d_model)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """List those of attention without the limit."""
        return self.unlimited.parameter_shapes(d_model)

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count projections, and scores and sums over the keys that a token sees.

        Token t of `length` sees min(t, window) keys: their mean is taken. The blocks in which they are
        computed are wider: what is masked is left out here, as it is for causal attention.
        """
        projections = 2 * d_model * (self.injection_width(d_model) + d_model)
        growing = min(length, self.window)
        keys = (growing * (growing + 1) / 2 + (length - growing) * self.window) / length
        return float(projections + 4 * d_model * keys)
