"""Mixers: components that mix a window of tokens. Their registration and most specs are in this file.

Importing this package imports no torch; the mixers' classes are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.mixers.attention import AttentionSpec as AttentionSpec
from implicit_blocks.mixers.attention import RopeScaling as RopeScaling
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import MixerSpec, linear_shapes, total
from implicit_blocks.specs.tensor_plan import Divided, Section, TensorPlan, columns, joined, rows

if TYPE_CHECKING:
    from implicit_blocks.mixers.attention.mixer import Attention as Attention
    from implicit_blocks.mixers.grid_conv import GridConv as GridConv
    from implicit_blocks.mixers.hybrid import Hybrid as Hybrid
    from implicit_blocks.mixers.mamba2.mixer import Mamba2 as Mamba2


Rate = Annotated[float, Field(gt=0, le=1e6)]
"""A time step or a decay rate; far above what trains, and within float32."""


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in mixers."""
    add("mixer", Mamba2Spec, "implicit_blocks.mixers.mamba2.mixer:Mamba2")
    add("mixer", AttentionSpec, "implicit_blocks.mixers.attention.mixer:Attention")
    add("mixer", GridConvSpec, "implicit_blocks.mixers.grid_conv:GridConv")
    add("mixer", HybridSpec, "implicit_blocks.mixers.hybrid:Hybrid")


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
    """Number of groups of heads that share B and C; divides the number of heads."""
    d_conv: PositiveInt = 4
    """Width of the causal convolution."""
    chunk_size: PositiveInt = 64
    """Tokens per chunk of the scan; changes the speed, not the values."""
    dt_min: Rate = 1e-3
    """Lower bound of the initial time steps, which are log-uniform."""
    dt_max: Rate = 1e-1
    """Upper bound of the initial time steps."""
    a_min: Rate = 1.0
    """Lower bound of the initial decay rates -A, which are uniform."""
    a_max: Rate = 16.0
    """Upper bound of the initial decay rates."""
    bias: bool = False
    """Whether the input and output projections have biases."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in the gated norm."""
    norm_groups: PositiveInt | None = None
    """Number of groups of the inner width that the gated norm normalizes separately; null: n_groups."""
    backend: Literal["auto", "torch", "mamba-ssm", "fla"] = "auto"
    """Backend of the scan. `auto`: chosen by installed packages, device and shapes; others: required."""
    conv_backend: Literal["auto", "torch", "causal-conv1d", "fla"] = "auto"
    """Backend of the convolution, chosen likewise."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for low, high in (("dt_min", "dt_max"), ("a_min", "a_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise field_error(f"{low} {least} is above {high} {most}; swap them", low, value=least)
        return self

    @property
    def divides_sequences(self) -> bool:
        """Whether ranks may have parts of a sequence: they pass the state of the scan along."""
        return True

    def check(self, d_model: int) -> None:
        """Check that `head_dim` and the numbers of groups divide the sizes that they must divide."""
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
        """Return the width of gate, x, B, C and dt: ``2 · d_inner + 2 · n_groups · d_state + n_heads``."""
        d_inner = self.expand * d_model
        return 2 * d_inner + 2 * self.n_groups * self.d_state + d_inner // self.head_dim

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A, dt_bias and D per head, in_proj, convolution, gated norm and out_proj."""
        d_inner = self.expand * d_model
        projected, convolved = self.injection_width(d_model), d_inner + 2 * self.n_groups * self.d_state
        heads = (d_inner // self.head_dim,)
        shapes: dict[str, tuple[int, ...]] = {"A_log": heads, "dt_bias": heads, "D": heads}
        shapes |= linear_shapes("in_proj", projected, d_model, bias=self.bias)
        shapes |= linear_shapes("conv", convolved, self.d_conv, bias=self.conv_bias)
        shapes["norm.weight"] = (d_inner,)
        return shapes | linear_shapes("out_proj", d_model, d_inner, bias=self.bias)

    def tensor_plan(self, d_model: int) -> TensorPlan:
        """Divide the heads and groups; a single group is copied, with its B and C."""
        d_inner = self.expand * d_model
        count, groups = d_inner // self.head_dim, self.n_groups
        inner, heads = Section(d_inner, count, "heads"), Section(count, count, "heads")
        maps = Section(groups * self.d_state, groups, "n_groups")
        projected = (inner, inner, maps, maps, heads)
        divided = {name: Divided(0, (heads,)) for name in ("A_log", "dt_bias", "D")}
        divided |= rows("in_proj", *projected, bias=self.bias)
        divided |= rows("conv", inner, maps, maps, bias=self.conv_bias)
        divided |= {"norm.weight": Divided(0, (inner,))} | columns("out_proj", inner)
        norms = {"norm": self.norm_groups or groups}
        sizes = {"d_inner": (inner,), "n_heads": (heads,), "conv_width": (inner, maps, maps)}
        sizes["n_groups"] = (Section(groups, groups),)
        return TensorPlan(divided, ("in_proj",), ("out_proj",), norms, injected=projected, sizes=sizes)

    def state_bytes(self, d_model: int, *, tokens: int, itemsize: int) -> int:
        """Count the convolution's last inputs, and h in float32 or better; both are of constant size."""
        d_inner = self.expand * d_model
        convolved = d_inner + 2 * self.n_groups * self.d_state
        return (self.d_conv - 1) * convolved * itemsize + d_inner * self.d_state * max(itemsize, 4)

    def headline(self, d_model: int) -> str:
        """Summarize heads, state and convolution."""
        groups = "" if self.n_groups == 1 else f", {self.n_groups} groups"
        heads = self.expand * d_model // self.head_dim
        return f"{heads} heads of {self.head_dim}{groups}, state {self.d_state}, convolution {self.d_conv}"

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count the projections, the convolution, and the chunked scan.

        In a chunk of Q tokens the scan computes all Q × Q products of each group's C and B, the masked half
        included, and applies them to every head's x (2 Q G N + 2 Q d_inner per token). The state is written
        and read once per token (4 N d_inner).
        """
        d_inner = self.expand * d_model
        chunk = min(self.chunk_size, length)
        projections = 2 * d_model * (self.injection_width(d_model) + d_inner)
        maps = self.n_groups * self.d_state
        convolution = 2 * self.d_conv * (d_inner + 2 * maps)
        scan = 2 * chunk * (maps + d_inner) + 4 * self.d_state * d_inner
        return float(projections + convolution + scan)


class GridConvSpec(MixerSpec):
    """A gated convolution over a board whose cells are the tokens: for puzzles, not for text or decoding."""

    is_causal: ClassVar[bool] = False

    kind: Literal["grid_conv"] = "grid_conv"
    columns: PositiveInt | None = None
    """Columns of the board; null: boards are square, and their size follows from the number of tokens."""
    kernel_size: PositiveInt = 3
    """Rows and columns of the kernel, an odd number."""
    d_inner: PositiveInt | None = None
    """Width E of the gate and of the values that it multiplies; null: d_model."""
    bias: bool = False
    """Whether the convolution and the output projection have biases."""

    @model_validator(mode="after")
    def _kernel_has_a_center(self) -> Self:
        if self.kernel_size % 2 == 0:
            message = (
                f"kernel_size {self.kernel_size} is even, and a kernel needs a center; choose an odd one"
            )
            raise field_error(message, "kernel_size", value=self.kernel_size)
        return self

    def inner_width(self, d_model: int) -> int:
        """Return the inner width E."""
        return self.d_inner or d_model

    def injection_width(self, d_model: int) -> int:
        """Return the width of the gate and the values."""
        return 2 * self.inner_width(d_model)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the convolution and of the output projection."""
        inner, size = self.inner_width(d_model), self.kernel_size
        shapes = linear_shapes("conv", 2 * inner, size * size * d_model, bias=self.bias)
        return shapes | linear_shapes("out_proj", d_model, inner, bias=self.bias)

    def state_bytes(self, d_model: int, *, tokens: int, itemsize: int) -> int:
        """Return 0: nothing is kept of a board."""
        return 0

    def headline(self, d_model: int) -> str:
        """Summarize the board, the kernel and the inner width."""
        board = "square boards" if self.columns is None else f"boards of {self.columns} columns"
        size, inner = self.kernel_size, self.inner_width(d_model)
        return f"{board}, kernel {size} x {size}, inner width {inner}"

    def flops_per_token(self, d_model: int, length: int) -> float:
        """Count the convolution and the output projection."""
        return float(2 * d_model * self.inner_width(d_model) * (2 * self.kernel_size**2 + 1))


class HybridSpec(MixerSpec):
    """Several mixers side by side in each layer with summed outputs: hybrids of attention and SSD."""

    kind: Literal["hybrid"] = "hybrid"
    mixers: Annotated[tuple[MixerSpec, ...], Field(min_length=2)]
    """The mixers, two or more; each has its own part of the injection and its own state."""

    @property
    def is_causal(self) -> bool:  # type: ignore[override]  # the parts decide
        """Whether all mixers are causal."""
        return all(mixer.is_causal for mixer in self.mixers)

    @property
    def divides_sequences(self) -> bool:
        """Whether all mixers support parts of sequences."""
        return all(mixer.divides_sequences for mixer in self.mixers)

    def check(self, d_model: int) -> None:
        """Check every mixer."""
        for number, mixer in enumerate(self.mixers):
            try:
                mixer.check(d_model)
            except ValueError as error:
                raise ValueError(f"mixers.{number}: {error}") from None

    def injection_width(self, d_model: int) -> int | None:
        """Return the sum of the mixers' widths."""
        return total(mixer.injection_width(d_model) for mixer in self.mixers)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]] | None:
        """Return the mixers' shapes, prefixed by their numbers."""
        found: dict[str, tuple[int, ...]] = {}
        for number, mixer in enumerate(self.mixers):
            shapes = mixer.parameter_shapes(d_model)
            if shapes is None:
                return None
            found |= {f"mixers.{number}.{name}": shape for name, shape in shapes.items()}
        return found

    def tensor_plan(self, d_model: int) -> TensorPlan | None:
        """Return the mixers' plans together; None if one of them has none."""
        plans = [mixer.tensor_plan(d_model) for mixer in self.mixers]
        known = {f"mixers.{number}.": plan for number, plan in enumerate(plans) if plan is not None}
        return None if len(known) < len(plans) else joined(known)

    def state_bytes(self, d_model: int, *, tokens: int, itemsize: int) -> int | None:
        """Return the sum of the mixers' states."""
        return total(mixer.state_bytes(d_model, tokens=tokens, itemsize=itemsize) for mixer in self.mixers)

    def headline(self, d_model: int) -> str:
        """Summarize each mixer's kind and sizes."""
        each = ((mixer.kind, mixer.headline(d_model)) for mixer in self.mixers)
        return " + ".join(f"{kind} ({sizes})" if sizes else kind for kind, sizes in each)

    def flops_per_token(self, d_model: int, length: int) -> float | None:
        """Return the sum of the mixers' FLOPs."""
        return total(mixer.flops_per_token(d_model, length) for mixer in self.mixers)

    def portable(self) -> Self:
        """Return a copy in which every mixer's backend fields have their defaults."""
        return self.model_copy(update={"mixers": tuple(mixer.portable() for mixer in self.mixers)})


if not TYPE_CHECKING:
    __getattr__ = names_of_components(__name__, register_components, RopeScaling=AttentionSpec.__module__)
