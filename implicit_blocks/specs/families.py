"""The base specs of the library's families, and what their fields share.

Sizes and costs are methods of the specs, so that they are known without building anything. They may return
None, "not known"; a third-party component that overrides them appears in the estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from implicit_blocks.registry import build, kinds
from implicit_blocks.specs.base import ComponentSpec, Spec
from implicit_blocks.specs.tensor_plan import Divided, Section, TensorPlan, columns, rows

_Number = TypeVar("_Number", int, float)

# ------------------------------------------------------------------------------------ solvers and gradients

Damping = Annotated[float, Field(gt=0, le=1)]
"""λ in ``z ← (1 - λ) z + λ f(z)``; 1 is the undamped step."""

Norm = Literal["relative", "absolute"]
Scope = Literal["sequence", "prefix"]


class Stopping(Spec):
    """When the search ends, decided separately for each sequence or token."""

    tolerance: NonNegativeFloat = 0.05
    """Converged once the residual is at or below it; 0 always takes every iteration."""
    max_iterations: PositiveInt = 32
    """Maximum number of calls of f in the search."""
    norm: Norm = "relative"
    """Residual ``‖f(z) - z‖ / ‖f(z)‖`` (relative) or ``‖f(z) - z‖`` (absolute)."""
    scope: Scope = "sequence"
    """`sequence`: stops as a whole. `prefix`: a token stops once it and all before it have converged."""


class SolverSpec(ComponentSpec):
    """Base of all solvers' specs: an update rule for ``z = f(z)``."""

    family: ClassVar[str] = "solver"
    builds: ClassVar[str | None] = "implicit_blocks.interfaces:Solver"
    differentiable: ClassVar[bool] = False
    """Whether autograd may differentiate the updates; gradient `unrolled` requires it."""
    couples_tokens: ClassVar[bool] = False
    """Whether a step at one token depends on later tokens of the row; refused with scope `prefix`."""
    elementwise: ClassVar[bool] = False
    """Whether the step of each value depends on that value alone, so that ranks can divide a sequence."""

    def state_bytes(self, features: int, *, itemsize: int) -> int:
        """Return the bytes that the solver keeps between steps per element, without the point itself.

        They are measured on what its ``init`` returns on the meta device; torch is imported for that.

        Args:
            features: values per element: tokens times width, or the width with scope `prefix`.
            itemsize: bytes per value, 2 (bfloat16), 4 or 8.

        """
        import torch
        from torch.utils import _pytree as pytree

        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
        state = build(self).init(torch.empty(1, features, dtype=dtype, device="meta"))
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(state))


class GradientSpec(ComponentSpec):
    """Base of all gradient estimators' specs."""

    family: ClassVar[str] = "gradient"
    builds: ClassVar[str | None] = "implicit_blocks.interfaces:GradientEstimator"
    differentiates_solver: ClassVar[bool] = False
    """Whether autograd differentiates the solver's updates, which must then be differentiable."""
    searches: ClassVar[bool] = True
    """Whether there is a search that is expected to reach the tolerance, rather than a number of steps."""
    divides_sequences: ClassVar[bool] = False
    """Whether ranks may have parts of the sequences: nothing but the search itself measures whole rows."""

    def forward_equivalents(self, iterations: float) -> float | None:
        """Return the cost of one training step in forward passes of the map, given the search's iterations.

        A backward pass counts 2. None: not known (the default; override it so that costs can be estimated).
        """
        return None

    @property
    def differentiated_calls(self) -> int:
        """Calls of the map that backward passes through: the kind's `steps`, or 1 without that field."""
        return int(getattr(self, "steps", 1))

    def differentiated_calls_of(self, iterations: int) -> int:
        """Return the calls that backward passes through, given the largest number of iterations.

        Override it where they depend on that number; by default ``differentiated_calls``.
        """
        return self.differentiated_calls


class ExitSpec(ComponentSpec):
    """Base of all exit criteria's specs: when a token leaves the search."""

    family: ClassVar[str] = "exit"
    builds: ClassVar[str | None] = "implicit_blocks.exits.exit:Exit"
    per_token: ClassVar[bool] = True
    """Whether the criterion decides per token; such a criterion is refused with scope `sequence`."""
    reads: ClassVar[Literal["predict", "gate"] | None] = None
    """What the criterion reads of the model: its predictions, or its exit gate."""


# ------------------------------------------------------------------------------------ mixers and MLPs


class Parameters(NamedTuple):
    """Parameter counts of one component."""

    weights: int
    """All parameters except the gains of weight norm."""
    weight_normed_rows: int
    """Output rows of its linear and convolution weights; weight norm has one gain per row."""


class _LayerPartSpec(ComponentSpec):
    """Common base of mixers' and MLPs' specs."""

    def check(self, d_model: int) -> None:
        """Check that the component supports a model width.

        Raises:
            ValueError: it does not; names the sizes that do not divide each other.

        """
        return None

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the parameters of one component by name. None: not known."""
        return None

    def parameter_count(self, d_model: int) -> Parameters | None:
        """Count the parameters of one component. None: not known."""
        shapes = self.parameter_shapes(d_model)
        if shapes is None:
            return None
        rows = sum(shape[0] for name, shape in shapes.items() if is_weight_normed(name, shape))
        return Parameters(sum(map(math.prod, shapes.values())), rows)

    def tensor_plan(self, d_model: int) -> TensorPlan | None:
        """Return how ranks divide the component among them. None: they can't, and a run that asks is refused.

        The class of the component has a method ``divide(ranks)`` that reduces its sizes accordingly, unless
        none of its methods uses them.
        """
        return None

    def headline(self, d_model: int) -> str:
        """Summarize the main sizes in a few words; by default the fields that differ from their defaults."""
        named = type(self).model_fields
        fields = {name: value for name, value in self if name != "kind" and value != named[name].default}
        return ", ".join(f"{name} {value}" for name, value in fields.items())

    def flops_per_token(self, d_model: int, length: int) -> float | None:
        """Return the FLOPs of a forward pass per token, in sequences of `length` tokens. None: not known.

        A multiply-add counts 2; element-wise operations are ignored.
        """
        return None


class MixerSpec(_LayerPartSpec):
    """Base of all mixers' specs: what carries information between tokens."""

    family: ClassVar[str] = "mixer"
    builds: ClassVar[str | None] = "implicit_blocks.interfaces:Mixer"

    is_causal: ClassVar[bool] = True
    """Whether a token's output is independent of later tokens; windows and decoding require it. A property
    where a field decides."""

    @property
    def divides_sequences(self) -> bool:
        """Whether the mixer gets what earlier tokens contribute from other ranks (``Window.part``)."""
        return False

    def injection_width(self, d_model: int) -> int | None:
        """Return the width of the injection that the mixer adds to its projections. None: not known."""
        return None

    def state_bytes(self, d_model: int, *, tokens: int, itemsize: int) -> int | None:
        """Return the bytes of the state of a sequence after `tokens` tokens. None: not known.

        `itemsize`: bytes per value of the weights' dtype, 2 (bfloat16), 4 or 8.
        """
        return None

    def portable(self) -> Self:
        """Return a copy without machine-specific choices: every backend field is reset to its default.

        Backend fields are `backend` and those whose names end in `_backend`.
        """
        fields = type(self).model_fields
        chosen = [name for name in fields if name == "backend" or name.endswith("_backend")]
        return self.model_copy(update={name: fields[name].default for name in chosen})


class MLPSpec(_LayerPartSpec):
    """Base of all MLPs' specs: what processes each token separately."""

    family: ClassVar[str] = "mlp"
    builds: ClassVar[str | None] = "torch.nn:Module"


def is_weight_normed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight norm applies to a parameter: its name ends in "weight" and it is not a vector."""
    return name.rpartition(".")[2] == "weight" and len(shape) >= 2


def linear_shapes(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a linear layer's parameters by name."""
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | ({f"{name}.bias": (rows,)} if bias else {})


def hidden_plan(inputs: tuple[str, ...], output: str, width: int, *, bias: bool) -> TensorPlan:
    """Return the plan of an MLP: the layers that produce its hidden width, and the one that reads it."""
    hidden = Section(width, width, "d_ff")
    divided: dict[str, Divided] = {}
    for name in inputs:
        divided |= rows(name, hidden, bias=bias)
    return TensorPlan(divided | columns(output, hidden), reads=("",), writes=(output,))


def total(numbers: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of numbers; None if one of them is not known."""
    known = list(numbers)
    return None if None in known else sum(known)  # type: ignore[arg-type]  # none of them is None


# ------------------------------------------------------------------------------------ the ends of the core


class InjectionSpec(ComponentSpec):
    """Base of all injections' specs: how the prelude's output enters the iterated core."""

    family: ClassVar[str] = "injection"
    builds: ClassVar[str | None] = "implicit_blocks.injections.base:Injection"
    z_init: ClassVar[str] = "zeros"
    """Kind of the initial state that the injection is usually combined with."""
    core_norm: ClassVar[bool] = False
    """Whether a norm at the end of the core is usually part of the iterated map."""
    adds_to_projections: ClassVar[bool] = False
    """Whether the mixers of the core add the injection to their input projections."""
    needs_equal_widths: ClassVar[bool] = True
    """Whether the core must be as wide as the model."""
    injects: ClassVar[bool] = True
    """Whether the iterated map reads the prelude's output; else only its start can."""

    def check(self, d_model: int, core_width: int) -> None:
        """Check that the injection supports different widths of the model and of its core.

        Raises:
            ValueError: it does not; names both widths.

        """
        if self.needs_equal_widths and d_model != core_width:
            raise ValueError(
                f"injection {self.kind!r} adds the prelude's output, of width {d_model}, to the core's "
                f"state, of width {core_width}; set core_d_model to {d_model}, or choose injection "
                "'concat', 'diagonal' or 'projection' with core_projection: true"
            )

    def parameter_shapes(
        self, d_model: int, core_width: int, projected: int | None
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the parameters by name; `projected` is the width of the mixers' projections.

        None: not known.
        """
        return {}

    def flops_per_token(
        self, d_model: int, core_width: int, projected: int | None
    ) -> tuple[float | None, float]:
        """Return the FLOPs of a forward pass per token: once, and in each call of the map."""
        return 0.0, 0.0


class ObjectiveSpec(ComponentSpec):
    """Base of all objectives' specs: the loss of a training step, given the iterates of the core."""

    family: ClassVar[str] = "objective"
    builds: ClassVar[str | None] = "implicit_blocks.models.objectives:Objective"
    reads_iterates: ClassVar[bool] = False
    """Whether the loss depends on iterates before the last one, which must be differentiated loops."""
    needs_gate: ClassVar[bool] = False
    """Whether the loss reads the model's exit gate."""

    @property
    def latest_iterate(self) -> int | None:
        """The largest number of loops whose iterate the loss names, if it reads iterates. None: none."""
        return None


# ------------------------------------------------------------------------------------ models and runs


class ModelSpec(ComponentSpec):
    """Base of all models' specs."""

    family: ClassVar[str] = "model"
    changeable: ClassVar[frozenset[str]] = frozenset()
    """Fields that a training phase may change while the weights are kept."""
    twin_of: ClassVar[frozenset[str]] = frozenset()
    """Kinds that switch to this one by changing `kind` alone; the fields that both have are kept."""

    def parameter_total(self) -> int | None:
        """Return the number of parameters, tied ones counted once. None: not known.

        For language models see `implicit_blocks.models.counting`.
        """
        return None


class BaseRunSpec(ComponentSpec):
    """Base of the specs of whole YAML files: a run has a model; its other sections are the trainer's."""

    family: ClassVar[str] = "run"
    read_before: ClassVar[tuple[str, ...]] = ("extends",)

    model: ModelSpec
    """The model that is trained."""

    @property
    def final_model(self) -> ModelSpec:
        """The model at the end of the run; phases may change its search settings."""
        return self.model


# ------------------------------------------------------------------------------------ parts of a looped core


def _kind_alone(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class StartSpec(ComponentSpec):
    """Base of all specs of initial states: the point at which the loop of the core begins.

    A field of this type also accepts the name of a kind: `embedding` is read as `{kind: embedding}`.
    """

    family: ClassVar[str] = "start"
    builds: ClassVar[str | None] = "implicit_blocks.starts.start:Start"
    depends_on_tokens: ClassVar[bool] = False
    """Whether the initial state is computed from the tokens."""

    noise_std: NonNegativeFloat = 0.0
    """Standard deviation of normal noise that is added to the initial state."""
    seed: NonNegativeInt = 0
    """Seed of all noise in evaluation; in training noise comes from torch's global generator."""

    def check(self, d_model: int, core_width: int) -> None:
        """Check that the kind supports a core whose width differs from that of the stream around it.

        Raises:
            ValueError: it does not; names both widths.

        """
        return None

    def parameter_count(self, core_width: int) -> int:
        """Return the number of parameters, 0 unless a kind overrides this method."""
        return 0

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let a field accept the name of a kind alone."""
        schema = super().__get_pydantic_core_schema__(source, handler)
        if "family" not in cls.__dict__:
            return schema
        return core_schema.no_info_before_validator_function(_kind_alone, schema)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the names of the kinds to the schema of a field."""
        json_schema = super().__get_pydantic_json_schema__(schema, handler)
        if "family" not in cls.__dict__:
            return json_schema
        return {"anyOf": [*json_schema["allOf"], {"enum": kinds(cls.family)}]}


class DepthSpec(ComponentSpec):
    """Base of all specs of depths: how often the core is looped in training."""

    family: ClassVar[str] = "depth"
    builds: ClassVar[str | None] = "implicit_blocks.depths.depth:Depth"

    def expected_loops(self) -> float | None:
        """Return the mean number of loops in training. None: the stopping rule decides."""
        return None

    def maximum_loops(self) -> int | None:
        """Return the largest number of loops in training. None: unbounded, or the stopping rule decides."""
        return None


class ScalingSpec(ComponentSpec):
    """Base of all specs of residual scalings: how a branch is added to the residual stream."""

    family: ClassVar[str] = "scaling"
    builds: ClassVar[str | None] = "implicit_blocks.scalings.scaling:Scaling"
    plain: ClassVar[bool] = False
    """Whether the branch is added as it is, so that a layer needs no module for it."""

    def parameter_count(self, d_model: int) -> int:
        """Return the number of parameters per branch, 0 unless a kind overrides this method."""
        return 0
