"""Attention: its spec, which the package of the mixers registers. Importing it imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs.base import Spec
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import MixerSpec, linear_shapes
from implicit_blocks.specs.tensor_plan import Divided, Section, TensorPlan, columns, rows


class RopeScaling(Spec):
    """Scaling of rotary wavelengths for long texts; names and meaning are those of transformers."""

    rope_type: Literal["linear", "llama3"]
    """`linear` divides all frequencies by the factor; `llama3` only low ones, with a smooth transition."""
    factor: Annotated[float, Field(ge=1)]
    """Factor by which frequencies are divided."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_position_embeddings / low_freq_factor use the full factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_position_embeddings / high_freq_factor are unchanged."""
    original_max_position_embeddings: PositiveInt = 8192
    """llama3: number of tokens of the texts of the original training."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            message = (
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}; swap them"
            )
            raise field_error(message, "low_freq_factor", value=self.low_freq_factor)
        return self


VALUE_GATE_CHANNELS = 32
"""Channels of the normed block input that the gate of value embeddings reads."""


class AttentionSpec(MixerSpec):
    """Attention with rotary position embeddings, causal by default, with optional grouped heads."""

    kind: Literal["attention"] = "attention"
    n_heads: PositiveInt
    """Number of query heads; without head_dim it divides d_model into heads of an even width."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads; null: n_heads."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the wavelengths; null: none."""
    head_dim: PositiveInt | None = None
    """Width of a head, even; null: d_model / n_heads."""
    bias: bool | Literal["qkv", "qk"] = False
    """Biases: true: of all projections; `qkv`: of queries, keys and values; `qk`: of queries and keys."""
    qk_norm: Literal["none", "weighted", "unweighted"] = "none"
    """RMS norm of each head of queries and keys before the rotation, with or without learned weights."""
    qk_norm_eps: PositiveFloat = 1e-6
    """Added to the mean square in that norm."""
    clip_qkv: PositiveFloat | None = None
    """Largest absolute value of queries, keys and values, which are clamped before norm and rotation."""
    causal: bool = True
    """Whether tokens attend only to themselves and earlier tokens; false excludes windows and decoding."""
    value_embeddings: PositiveInt | None = None
    """Rows of a table of token embeddings added to the values, one per token ID; null: no table."""
    backend: Literal["auto", "torch", "sdpa", "flash-attn", "flex", "xformers"] = "auto"
    """Backend of attention. `auto`: chosen by installed packages, device and shapes; others: required."""

    @model_validator(mode="after")
    def _divisible_heads(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            message = (
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}; "
                "choose a divisor, or null for as many as query heads"
            )
            raise field_error(message, "n_kv_heads", value=self.n_kv_heads)
        return self

    def check(self, d_model: int) -> None:
        """Check the width of the heads, which must be even, and that the gate of value embeddings fits."""
        if self.value_embeddings is not None and d_model < VALUE_GATE_CHANNELS:
            raise ValueError(
                f"d_model {d_model} is below {VALUE_GATE_CHANNELS}, the number of channels that the gate of "
                f"value_embeddings reads; choose a d_model of at least {VALUE_GATE_CHANNELS}, or "
                "value_embeddings null"
            )
        if self.head_dim is not None:
            if self.head_dim % 2:
                raise ValueError(
                    f"head_dim {self.head_dim} is odd, and rotary embeddings rotate pairs; choose an even one"
                )
            return
        if d_model % self.n_heads:
            raise ValueError(
                f"d_model {d_model} is not divisible by n_heads {self.n_heads}; "
                f"choose a multiple of {self.n_heads}"
            )
        width = d_model // self.n_heads
        if width % 2:
            raise ValueError(
                f"the head width d_model / n_heads = {d_model} / {self.n_heads} = {width} is odd, and rotary "
                "embeddings rotate pairs; choose n_heads so that it is even"
            )

    def head_width(self, d_model: int) -> int:
        """Return the width of a head."""
        return self.head_dim or d_model // self.n_heads

    @property
    def is_causal(self) -> bool:  # type: ignore[override]  # a field decides
        """Whether tokens attend only to themselves and earlier tokens."""
        return self.causal

    @property
    def divides_sequences(self) -> bool:
        """Whether ranks may have parts of a sequence: causal attention gathers earlier keys and values."""
        return self.causal

    @property
    def has_input_bias(self) -> bool:
        """Whether the projection of queries, keys and values has a bias."""
        return self.bias is True or self.bias == "qkv"

    @property
    def has_output_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.bias is True

    def injection_width(self, d_model: int) -> int:
        """Return the width of queries, keys and values."""
        return (self.n_heads + 2 * (self.n_kv_heads or self.n_heads)) * self.head_width(d_model)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the projections (q, k and v; out) and of the options' parameters."""
        width, kv_heads = self.head_width(d_model), self.n_kv_heads or self.n_heads
        shapes: dict[str, tuple[int, ...]] = {}
        if self.bias == "qk":
            shapes["qk_bias"] = ((self.n_heads + kv_heads) * width,)
        shapes |= linear_shapes("in_proj", self.injection_width(d_model), d_model, bias=self.has_input_bias)
        shapes |= linear_shapes("out_proj", d_model, self.n_heads * width, bias=self.has_output_bias)
        if self.qk_norm == "weighted":
            shapes |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
        if self.value_embeddings is not None:
            shapes |= linear_shapes("value_gate", kv_heads, VALUE_GATE_CHANNELS, bias=False)
            shapes["value_embedding.weight"] = (self.value_embeddings, kv_heads * width)
        return shapes

    def tensor_plan(self, d_model: int) -> TensorPlan:
        """Divide the heads; a single head of keys and values is copied."""
        width, kv_heads = self.head_width(d_model), self.n_kv_heads or self.n_heads
        queries = Section(self.n_heads * width, self.n_heads, "n_heads")
        keys = Section(kv_heads * width, kv_heads, "n_kv_heads")
        divided = rows("in_proj", queries, keys, keys, bias=self.has_input_bias)
        if self.bias == "qk":
            divided["qk_bias"] = Divided(0, (queries, keys))
        if self.qk_norm == "weighted":
            copied = Divided(0, (Section(width, 1),))
            divided |= {"q_norm.weight": copied, "k_norm.weight": copied}
        reads: tuple[str, ...] = ("in_proj",)
        if self.value_embeddings is not None:
            divided |= rows("value_gate", Section(kv_heads, kv_heads, "n_kv_heads"), bias=False)
            divided |= columns("value_embedding", keys)
            reads += ("value_gate",)
        divided |= columns("out_proj", queries)
        heads = {"n_heads": self.n_heads, "n_kv_heads": kv_heads}
        sizes = {name: (Section(count, count),) for name, count in heads.items()}
        return TensorPlan(divided, reads, ("out_proj",), injected=(queries, keys, keys), sizes=sizes)

    def state_bytes(self, d_model: int, *, tokens: int, itemsize: int) -> int:
        """Count the keys and values of all tokens."""
        return 2 * tokens * (self.n_kv_heads or self.n_heads) * self.head_width(d_model) * itemsize

    def headline(self, d_model: int) -> str:
        """Summarize heads, positions and options."""
        shared = "" if self.n_kv_heads is None else f", {self.n_kv_heads} of keys and values"
        scaled = "" if self.rope_scaling is None else f", {self.rope_scaling.rope_type} scaling"
        options = [
            "" if self.causal else "bidirectional",
            "" if self.qk_norm == "none" else f"{self.qk_norm} qk norm",
            "" if self.clip_qkv is None else f"q, k, v up to {self.clip_qkv:g}",
            f"bias {self.bias}" if isinstance(self.bias, str) else "",
            "" if self.value_embeddings is None else f"{self.value_embeddings} value embeddings",
        ]
        return (
            f"{self.n_heads} heads of {self.head_width(d_model)}{shared}, RoPE θ {self.rope_theta:g}{scaled}"
            + "".join(f", {option}" for option in options if option)
        )

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count the projections, and scores and sums over all keys.

        Causal attention has (length + 1) / 2 keys on average.
        """
        attended = self.n_heads * self.head_width(d_model)
        projections = 2 * d_model * (self.injection_width(d_model) + attended)
        gates = 2 * VALUE_GATE_CHANNELS * (self.n_kv_heads or self.n_heads)
        keys_twice = length + 1 if self.causal else 2 * length
        return float(
            projections + 2 * attended * keys_twice + (0 if self.value_embeddings is None else gates)
        )
