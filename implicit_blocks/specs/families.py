"""Mixers and MLPs: what a layer is made of, and what it costs.

Costs are stated by each spec itself, so that sizes are known without building anything. The methods may
answer None, "not known"; a third party that overrides them makes its component visible to the estimates.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs.base import ComponentSpec, Spec
from implicit_blocks.specs.errors import field_error


class Parameters(NamedTuple):
    """Numbers of parameters of one component."""

    weights: int
    """All of them but weight norm's gains."""
    weight_normed_rows: int
    """Output rows of its linear and convolution weights: one gain each under weight norm."""


class _LayerPartSpec(ComponentSpec):
    """What mixers and MLPs have in common."""

    def check(self, d_model: int) -> None:
        """Refuse a model width that doesn't fit.

        Raises:
            ValueError: says what doesn't divide what.

        """
        return None

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]] | None:
        """Shapes of the parameters of one such component by their names when built. None: not known."""
        return None

    def parameter_count(self, d_model: int) -> Parameters | None:
        """Count those parameters. None: not known."""
        shapes = self.parameter_shapes(d_model)
        if shapes is None:
            return None
        rows = sum(shape[0] for name, shape in shapes.items() if is_weight_normed(name, shape))
        return Parameters(sum(map(math.prod, shapes.values())), rows)

    def headline(self, d_model: int) -> str:
        """Say the main sizes in a few words; by default the fields that differ from their defaults."""
        named = type(self).model_fields
        fields = {name: value for name, value in self if name != "kind" and value != named[name].default}
        return ", ".join(f"{name} {value}" for name, value in fields.items())

    def flops_per_token(self, d_model: int, length: int) -> float | None:
        """Floating-point operations of a forward pass, a token, in sequences of `length`. None: not known.

        A multiply-add counts 2; element-wise work is left out.
        """
        return None


class MixerSpec(_LayerPartSpec):
    """Base of all mixers' specs: what carries information between tokens."""

    family: ClassVar[str] = "mixer"
    builds: ClassVar[str | None] = "implicit_blocks.interfaces:Mixer"

    def injection_width(self, d_model: int) -> int | None:
        """Width of the injection that the mixer adds to its projections. None: not known."""
        return None

    def portable(self) -> Self:
        """Return the spec without what suits one machine: choices of backends go back to their defaults.

        They are the fields `backend` and those whose names end in `_backend`.
        """
        fields = type(self).model_fields
        chosen = [name for name in fields if name == "backend" or name.endswith("_backend")]
        return self.model_copy(update={name: fields[name].default for name in chosen})


class MLPSpec(_LayerPartSpec):
    """Base of all MLPs' specs: what works on each token by itself."""

    family: ClassVar[str] = "mlp"
    builds: ClassVar[str | None] = "torch.nn:Module"


class Mamba2Spec(MixerSpec):
    """Mamba2's state-space mixer: Dao & Gu, "Transformers are SSMs", 2024."""

    kind: Literal["mamba2"] = "mamba2"
    d_state: PositiveInt = 128
    """State width N of each head."""
    expand: PositiveInt = 2
    """Inner width as a multiple of the model's."""
    head_dim: PositiveInt = 64
    """Width P of a head; divides the inner width."""
    n_groups: PositiveInt = 1
    """Groups of heads that share B and C; divide the number of heads."""
    d_conv: PositiveInt = 4
    """Width of the causal convolution."""
    chunk_size: PositiveInt = 64
    """Tokens that the scan takes at once: changes speed, not values."""
    dt_min: PositiveFloat = 1e-3
    """Initial time steps are log-uniform from here ..."""
    dt_max: PositiveFloat = 1e-1
    """... to here."""
    a_min: PositiveFloat = 1.0
    """Initial decay rates -A are uniform from here ..."""
    a_max: PositiveFloat = 16.0
    """... to here."""
    bias: bool = False
    """Whether the input and output projections have biases."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in the gated norm."""
    norm_groups: PositiveInt | None = None
    """Parts of the inner width that the gated norm takes each by itself; null: as many as n_groups."""
    backend: Literal["auto", "torch", "mamba-ssm", "fla"] = "auto"
    """What computes the scan. `auto`: by what is installed, the device and shapes; else this or an error."""
    conv_backend: Literal["auto", "torch", "causal-conv1d", "fla"] = "auto"
    """What computes the convolution, likewise."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for low, high in (("dt_min", "dt_max"), ("a_min", "a_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise field_error(f"{low} {least} is above {high} {most}; exchange them", low, value=least)
        return self

    def check(self, d_model: int) -> None:
        """Refuse a `head_dim` that doesn't divide the inner width, and groups that don't."""
        d_inner = self.expand * d_model
        if d_inner % self.head_dim:
            raise ValueError(
                f"the inner width expand * d_model = {self.expand} * {d_model} = {d_inner} is not divisible "
                f"by head_dim {self.head_dim}; choose a head_dim that divides it"
            )
        heads = d_inner // self.head_dim
        if heads % self.n_groups:
            raise ValueError(
                f"the {heads} heads are not divisible by n_groups {self.n_groups}; choose a divisor"
            )
        if self.norm_groups is not None and d_inner % self.norm_groups:
            raise ValueError(
                f"the inner width {d_inner} is not divisible by norm_groups {self.norm_groups}; "
                "choose a divisor"
            )

    def injection_width(self, d_model: int) -> int:
        """Count gate, x, B, C and dt: ``2 · d_inner + 2 · n_groups · d_state + n_heads``."""
        d_inner = self.expand * d_model
        return 2 * d_inner + 2 * self.n_groups * self.d_state + d_inner // self.head_dim

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """List A, dt_bias and D of each head, in_proj, convolution, gated norm, out_proj."""
        d_inner = self.expand * d_model
        projected, convolved = self.injection_width(d_model), d_inner + 2 * self.n_groups * self.d_state
        heads = (d_inner // self.head_dim,)
        shapes: dict[str, tuple[int, ...]] = {"A_log": heads, "dt_bias": heads, "D": heads}
        shapes |= _linear("in_proj", projected, d_model, bias=self.bias)
        shapes |= _linear("conv", convolved, self.d_conv, bias=self.conv_bias)
        shapes["norm.weight"] = (d_inner,)
        return shapes | _linear("out_proj", d_model, d_inner, bias=self.bias)

    def headline(self, d_model: int) -> str:
        """Say heads, state and convolution."""
        groups = "" if self.n_groups == 1 else f", {self.n_groups} groups"
        heads = self.expand * d_model // self.head_dim
        return f"{heads} heads of {self.head_dim}{groups}, state {self.d_state}, convolution {self.d_conv}"

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count projections, convolution, and the chunked scan.

        In a chunk of Q tokens the scan forms all Q × Q products of each group's C and B, the masked half too,
        and applies them to every head's x (2 Q G N + 2 Q d_inner a token); the state is written and read once
        a token (4 N d_inner).
        """
        d_inner = self.expand * d_model
        chunk = min(self.chunk_size, length)
        projections = 2 * d_model * (self.injection_width(d_model) + d_inner)
        maps = self.n_groups * self.d_state
        convolution = 2 * self.d_conv * (d_inner + 2 * maps)
        scan = 2 * chunk * (maps + d_inner) + 4 * self.d_state * d_inner
        return float(projections + convolution + scan)


class RopeScaling(Spec):
    """How rotary wavelengths are stretched for long texts; names and meaning are those of transformers."""

    rope_type: Literal["linear", "llama3"]
    """`linear` divides all frequencies by the factor; `llama3` the low ones only, with a smooth passage."""
    factor: Annotated[float, Field(ge=1)]
    """By how much frequencies are divided."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_position_embeddings / low_freq_factor take the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_position_embeddings / high_freq_factor stay as they are."""
    original_max_position_embeddings: PositiveInt = 8192
    """llama3: tokens of the texts that the model was first trained on."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            message = (
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}; exchange them"
            )
            raise field_error(message, "low_freq_factor", value=self.low_freq_factor)
        return self


class AttentionSpec(MixerSpec):
    """Causal attention with rotary positions and, where asked for, grouped heads."""

    kind: Literal["attention"] = "attention"
    n_heads: PositiveInt
    """Query heads; divide d_model into heads of an even width, unless that is given."""
    n_kv_heads: PositiveInt | None = None
    """Key and value heads, each shared by n_heads / n_kv_heads query heads; null: as many as query heads."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretched wavelengths; null: as they are."""
    head_dim: PositiveInt | None = None
    """Width of a head, even; null: d_model / n_heads."""
    bias: bool = False
    """Whether the projections of q, k and v, and out, have biases."""
    backend: Literal["auto", "torch", "sdpa", "flash-attn", "flex", "xformers"] = "auto"
    """What computes attention: `auto`: by what is installed, device and shapes; else this or an error."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            message = (
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}; "
                "choose a divisor, or null for as many as query heads"
            )
            raise field_error(message, "n_kv_heads", value=self.n_kv_heads)
        return self

    def check(self, d_model: int) -> None:
        """Refuse an `n_heads` that doesn't divide the width into even heads, or an odd `head_dim`."""
        if self.head_dim is not None:
            if self.head_dim % 2:
                raise ValueError(
                    f"head_dim {self.head_dim} is odd, and rotary positions turn pairs; make it even"
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
                "positions turn pairs; choose n_heads so that it is even"
            )

    def head_width(self, d_model: int) -> int:
        """Width of a head."""
        return self.head_dim or d_model // self.n_heads

    def injection_width(self, d_model: int) -> int:
        """Count queries, keys and values."""
        return (self.n_heads + 2 * (self.n_kv_heads or self.n_heads)) * self.head_width(d_model)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """List the projections of q, k and v, and out."""
        attended = self.n_heads * self.head_width(d_model)
        projected = _linear("in_proj", self.injection_width(d_model), d_model, bias=self.bias)
        return projected | _linear("out_proj", d_model, attended, bias=self.bias)

    def headline(self, d_model: int) -> str:
        """Say heads and positions."""
        shared = "" if self.n_kv_heads is None else f", {self.n_kv_heads} of keys and values"
        scaled = "" if self.rope_scaling is None else f", {self.rope_scaling.rope_type} scaling"
        return (
            f"{self.n_heads} heads of {self.head_width(d_model)}{shared}, RoPE θ {self.rope_theta:g}{scaled}"
        )

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count projections, and scores and sums over the causal half, ``(length + 1) / 2`` on average."""
        attended = self.n_heads * self.head_width(d_model)
        projections = 2 * d_model * (self.injection_width(d_model) + attended)
        return float(projections + 2 * attended * (length + 1))


class SwiGLUSpec(MLPSpec):
    """``W_out (silu(W_gate z) · W_up z)``."""

    kind: Literal["swiglu"] = "swiglu"
    d_ff: PositiveInt
    """Hidden width; the paper takes ``int(2/3 · 4 · d_model)``."""
    bias: bool = False
    """Whether the three layers have biases."""

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """List three matrices."""
        shapes = _linear("gate_proj", self.d_ff, d_model, bias=self.bias)
        shapes |= _linear("up_proj", self.d_ff, d_model, bias=self.bias)
        return shapes | _linear("out_proj", d_model, self.d_ff, bias=self.bias)

    def headline(self, d_model: int) -> str:
        """Say the hidden width."""
        return f"hidden width {self.d_ff}"

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count three matrix products."""
        return float(6 * d_model * self.d_ff)


def is_weight_normed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight norm is put on a parameter: what is called weight and is no vector."""
    return name.rpartition(".")[2] == "weight" and len(shape) >= 2


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | ({f"{name}.bias": (rows,)} if bias else {})
