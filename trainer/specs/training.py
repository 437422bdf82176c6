"""The `training` section: durations within a run, schedules of the learning rate, and the settings of a run.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from implicit_blocks.specs import ComponentSpec, Spec, field_error
from trainer.specs.data import Probability
from trainer.specs.distributed import DistributedSpec
from trainer.specs.optimizers import Beta, OptimizerSpec

# ------------------------------------------------------------------------------------ durations

_STEPS_OR_SHARE = "a number of steps (an integer, 0 or more)", "a share of the run (a float from 0.0 to 1.0)"
_TOKENS = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?) ?tokens?")
_MOST_TOKENS = 10**18


def _span(value: Any) -> int | float:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    raise ValueError(f"give {' or '.join(_STEPS_OR_SHARE)}")


def _span_or_tokens(value: Any) -> int | float | str:
    if isinstance(value, str) and (found := _TOKENS.fullmatch(value.strip())):
        tokens = Decimal(found[1])
        if 1 <= tokens <= _MOST_TOKENS and tokens == int(tokens):
            return f"{int(tokens)} tokens"
    else:
        try:
            return _span(value)
        except ValueError:
            pass
    raise ValueError(
        f"give {', '.join(_STEPS_OR_SHARE)} or a whole number of tokens with its unit (2e9 tokens)"
    )


def tokens_of(span: str) -> int:
    """Return the number of tokens in a validated :data:`Span` that counts them."""
    return int(span.removesuffix(" tokens"))


def steps_of(amount: float | int | str, total_steps: int) -> int:
    """Return ``amount`` in steps: a float up to 1.0 is a fraction of the run, any other number is in steps.

    A fraction is rounded to the nearest step. Amounts in tokens must be converted first
    (`ScheduleSpec.in_steps`).
    """
    assert not isinstance(amount, str)
    if isinstance(amount, float) and amount <= 1.0:
        return round(amount * total_steps)
    return int(amount)


Span = Annotated[int | float | str, PlainValidator(_span_or_tokens, json_schema_input_type=int | float | str)]
"""An integer counts steps, a float from 0.0 to 1.0 is a share of the run (1 is one step, 1.0 the whole run),
and text such as ``2e9 tokens`` counts tokens, rounded up to whole steps."""

Until = Span
"""A span counted from the start of the run."""

# ------------------------------------------------------------------------------------ schedules

FinalFraction = Annotated[float, Field(ge=0, le=1)]


class ScheduleSpec(ComponentSpec):
    """Base class of all schedule specs: the learning rate as a function of the step."""

    family: ClassVar[str] = "schedule"
    builds: ClassVar[str | None] = "trainer.optim.schedules:Schedule"
    from_the_end: ClassVar[frozenset[str]] = frozenset()
    """Fields that are spans at the end of the run; all others are spans at its start. The distinction matters
    for spans in tokens when the batch changes: builders receive steps or shares."""

    def in_steps(self, steps: Callable[..., int]) -> Self:
        """Return a copy with spans in tokens converted to steps by ``steps(tokens, from_the_end=…)``."""
        spans = {name: getattr(self, name) for name in type(self).model_fields}
        counted = {
            name: steps(tokens_of(span), from_the_end=name in self.from_the_end)
            for name, span in spans.items()
            if isinstance(span, str) and span.endswith(" tokens")
        }
        return self.model_copy(update=counted)

    def check(self, total_steps: int) -> None:
        """Reject a run that is too short.

        Raises:
            ValueError: explains which span does not fit.

        """
        return None


class _SpannedSpec(ScheduleSpec):
    """A schedule with a span `warmup` at the start of the run, and perhaps a `decay` at its end."""

    def check(self, total_steps: int) -> None:
        """Reject a run that is shorter than the schedule's `warmup` and `decay`.

        Raises:
            ValueError: the spans do not fit into the run.

        """
        spans = [
            (name, steps_of(getattr(self, name), total_steps))
            for name in ("warmup", "decay")
            if name in type(self).model_fields
        ]
        if sum(steps for _, steps in spans) > total_steps:
            (name, steps), *others = spans
            listed = " and ".join([f"a {name} of {steps} steps", *(f"a {name} of {n}" for name, n in others)])
            verb, them = ("don't", "them") if others else ("doesn't", "it")
            raise ValueError(
                f"{listed} {verb} fit into {total_steps} steps; shorten {them}, or use shares of the run "
                "such as 0.1"
            )


class WarmupConstantSqrtSpec(_SpannedSpec):
    """Linear warmup, constant rate, then a ``1 - sqrt`` decay."""

    from_the_end: ClassVar[frozenset[str]] = frozenset({"decay"})

    kind: Literal["warmup_constant_sqrt"] = "warmup_constant_sqrt"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    decay: Span = 0.2
    """Length of the decay at the end of the run: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 1e-5
    """Learning rate of the last step."""


class WarmupLinearSpec(_SpannedSpec):
    """Linear warmup, then linear decay."""

    kind: Literal["warmup_linear"] = "warmup_linear"
    warmup: Span = 0.1
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 0.0
    """Learning rate one step after the last, so that no step has a learning rate of 0."""


class CosineSpec(_SpannedSpec):
    """Linear warmup, then half a cosine from the peak to a fraction of it."""

    kind: Literal["cosine"] = "cosine"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_fraction: FinalFraction = 0.1
    """Learning rate one step after the last, as a fraction of the peak."""


class LinearSpec(_SpannedSpec):
    """Linear warmup, then a linear decay from the peak to a fraction of it."""

    kind: Literal["linear"] = "linear"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_fraction: FinalFraction = 0.0
    """Learning rate one step after the last, as a fraction of the peak."""


class WSDSpec(_SpannedSpec):
    """Linear warmup, stable rate, decay at the end (WSD; Hu et al., 2024; Hägele et al., 2024)."""

    from_the_end: ClassVar[frozenset[str]] = frozenset({"decay"})

    kind: Literal["wsd"] = "wsd"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    decay: Span = 0.2
    """Length of the decay at the end of the run: steps, a share of the run, or tokens."""
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """Shape of the decay: linear, or one minus the square root of the progress."""
    final_fraction: FinalFraction = 0.0
    """Learning rate one step after the last, as a fraction of the peak."""


class ConstantSpec(_SpannedSpec):
    """Linear warmup, then the peak rate to the end of the run."""

    kind: Literal["constant"] = "constant"
    warmup: Span = 0.0
    """Length of the warmup: steps, a share of the run, or tokens."""


class RewarmedSpec(_SpannedSpec):
    """Another schedule with a second linear warmup, such as where a phase changes the number of loops."""

    kind: Literal["rewarmed"] = "rewarmed"
    at: Until
    """Where the second warmup begins: steps, a share of the run, or tokens."""
    warmup: Span = 40
    """Length of the second warmup: steps, a share of the run, or tokens."""
    schedule: ScheduleSpec = WarmupConstantSqrtSpec()
    """The schedule whose learning rates are multiplied by the second warmup."""

    def in_steps(self, steps: Callable[..., int]) -> Self:
        """Return a copy with spans in tokens, those of `schedule` too, converted to steps."""
        return super().in_steps(steps).model_copy(update={"schedule": self.schedule.in_steps(steps)})

    def check(self, total_steps: int) -> None:
        """Reject a run that ends before the second warmup does, or is too short for `schedule`."""
        self.schedule.check(total_steps)
        at, warmup = steps_of(self.at, total_steps), steps_of(self.warmup, total_steps)
        if at + warmup > total_steps:
            raise ValueError(
                f"a second warmup of {warmup} steps after step {at} doesn't fit into {total_steps} steps; "
                "begin it earlier, or shorten it"
            )


# ------------------------------------------------------------------------------------ settings

Seed = Annotated[int, Field(ge=0, lt=2**64)]
CheckpointActivations = Literal["none", "steps", "layers"]


class InitFromSpec(Spec):
    """Initial weights, and what else to load from another run."""

    path: Annotated[str, Field(min_length=1)]
    """A run directory (its newest valid checkpoint), a checkpoint, a pretrained folder of transformers, or a
    safetensors file. The models must be equal except for fields that a phase may change. An explicit model
    can initialize an implicit one, whose injection then starts from zero."""
    optimizer: bool = False
    """Load the optimizer's moments too; false: start with a fresh optimizer. Checkpoints only."""
    position: bool = False
    """Continue the data at the sample where the other run stopped, which is meaningful for the same data and
    seed; false: start with the first sample. Checkpoints only."""


def _from_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


InitFrom = Annotated[InitFromSpec, BeforeValidator(_from_path, json_schema_input_type=str | InitFromSpec)]
"""The full mapping, or its `path` alone."""


class EMASpec(Spec):
    """An exponential moving average of the weights: `average ← decay · average + (1 − decay) · weights`.

    The averaged weights are those of the model everywhere outside training: evaluations, exports, and loading
    a checkpoint use them.
    """

    decay: Beta = 0.999
    """Share of the old average that each step keeps."""
    start: Span = 0
    """Begin of the averaging: steps, a share of the run, or tokens. Until then the model has the weights of
    training."""


class TrainingSpec(Spec):
    """The `training` section."""

    max_steps: PositiveInt | None = None
    """Length of the run in steps."""
    max_tokens: PositiveInt | None = None
    """Length of the run in tokens, rounded up to whole steps. If both are set, the shorter one applies."""
    epochs: PositiveFloat | None = None
    """Length of the run in passes over the data, rounded up to whole steps, instead of `max_steps` and
    `max_tokens`; for data of a finite size."""
    init_from: InitFrom | None = None
    """Source of the initial weights: a run (its newest checkpoint), a checkpoint, a pretrained folder of
    transformers, a safetensors file, or a mapping with that as `path`. Null: random initialization."""
    batch_size: PositiveInt
    """Sequences per step, over all ranks and micro-batches."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per forward pass on a rank; must divide a larger `batch_size`. Null: the rank's whole
    share."""
    seed: Seed = 0
    """Seed of the initial weights, the data and dropout."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum gradient norm; null: no clipping. The paper does not report its value."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; weights and residuals are always float32."""
    compile_layers: bool = False
    """Compile the model's layers: the first step takes minutes, later steps are faster on a GPU."""
    cuda_graphs: bool = False
    """Capture the model's map as CUDA graphs: each iteration of the search is one launch, which helps when
    many small kernels keep the host busy. Keeps a second copy of weights and gradients in the compute type;
    has no effect on the CPU and with sharded weights, whose addresses change."""
    search_dtype: Literal["float8_e4m3fn"] | None = None
    """Type of the matrix products in the first iterations of a search: 8-bit floats, which Hopper and Ada
    GPUs multiply faster than bfloat16. The last iteration and everything that is differentiated are in
    `precision`, and only they decide about convergence. Null: `precision` throughout. GPUs without such
    products, and layers of unsupported shapes, keep `precision`; the log has the reason."""
    distributed: DistributedSpec = DistributedSpec()
    """How the run is distributed over its processes."""
    checkpoint_activations: CheckpointActivations = "none"
    """What backward recomputes instead of storing, at the cost of one more forward pass of the differentiated
    part: nothing; each step of the map, storing only its input; or each layer of each step, which stores the
    activations of one layer at a time instead of a whole step."""
    optimizer: OptimizerSpec
    """The optimizer."""
    schedule: ScheduleSpec = WarmupConstantSqrtSpec()
    """Learning rate as a function of the step."""
    ema: EMASpec | None = None
    """Moving average of the weights; null: none."""
    loader_threads: NonNegativeInt = 1
    """Threads that prepare the next batches during a step; 0: none. The batches do not depend on it."""
    log_every: PositiveInt = 10
    """Smallest number of steps between progress lines when no terminal shows a bar; a run prints about 20 of
    them, and at most one a minute more. The metrics contain every step."""
    evaluate_every: PositiveInt | None = None
    """Steps between evaluations; null: only at the end."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints; null: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep checkpoints at multiples of this many steps; null: only the newest."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """Whether a checkpoint that cannot be written (a full disk) ends the run; earlier checkpoints stay
    intact."""
    export_every: PositiveInt | None = None
    """Steps between exports of the model to the `exports` directory of the run, with one more at the end:
    pretrained folders for transformers' from_pretrained, or model.safetensors without transformers; null: no
    exports."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Response to a NaN or Inf loss or gradient: end the run, or skip the update. Either way the weights are
    unchanged and the positions of the batch's samples are reported."""
    max_consecutive_skips: PositiveInt = 10
    """Maximum number of consecutive skipped batches; one more ends the run."""
    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of one device, for utilization; null: from a table of known devices."""
    threads: PositiveInt | None = None
    """CPU threads; null: torch's default. Results are bitwise reproducible only for the same number of
    threads."""

    @model_validator(mode="after")
    def _some_length(self) -> Self:
        lengths = {name: getattr(self, name) for name in ("max_steps", "max_tokens")}
        set_lengths = [name for name, value in lengths.items() if value is not None]
        if self.epochs is None and not set_lengths:
            raise ValueError("the length of the run is missing; give max_steps or max_tokens, or epochs")
        if self.epochs is not None and set_lengths:
            others = " and ".join(f"{name}={lengths[name]}" for name in set_lengths)
            unset = " ".join(f"training.{name}=null" for name in set_lengths)
            message = f"the length of the run is given twice, also by {others}; omit epochs, or set {unset}"
            raise field_error(message, "epochs", value=self.epochs)
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.batch_size % self.sequences_at_once:
            message = (
                f"batch_size {self.batch_size} is not divisible by micro_batch_size {self.micro_batch_size}; "
                "choose a divisor"
            )
            raise field_error(message, "micro_batch_size", value=self.micro_batch_size)
        return self

    @property
    def sequences_at_once(self) -> int:
        """Sequences per forward pass."""
        return min(self.micro_batch_size or self.batch_size, self.batch_size)

    def share(self, ranks: int) -> int:
        """Return the number of sequences per step on each rank.

        Raises:
            ValueError: the batch size is not divisible by the number of ranks.

        """
        if self.batch_size % ranks:
            raise ValueError(
                f"training.batch_size {self.batch_size} is not divisible by {ranks} processes; choose "
                "a multiple of their number, or another number of processes"
            )
        return self.batch_size // ranks


class EvaluationSpec(Spec):
    """The `evaluation` section."""

    lengths: tuple[PositiveInt, ...] = ()
    """Sequence lengths; empty: the training length."""
    length_multiples: tuple[PositiveInt, ...] = ()
    """Sequence lengths as multiples of the training length, such as [1, 2, 4, 8]; used if `lengths` is
    empty."""
    identity_probabilities: tuple[Probability, ...] = ()
    """Identity probabilities for word problems; empty: the training value."""
    sequences: PositiveInt = 256
    """Sequences per length and probability."""
    batch_size: PositiveInt = 64
    """Sequences per forward pass at the shortest length; reduced in proportion at longer ones."""
    last_tokens: PositiveInt = 10
    """Number of tokens at the end of each sequence on which accuracy_last is measured."""
    seed: Seed = 1234
    """Seed of the evaluation sequences."""
    window_length: PositiveInt | None = None
    """Tokens solved together: 1 is sequential mode; null: the whole sequence, simultaneous mode."""

    def at(self, training_length: int) -> EvaluationSpec:
        """Return a copy with `lengths` resolved for a training length."""
        lengths = self.lengths or tuple(times * training_length for times in self.length_multiples)
        return self.model_copy(update={"lengths": lengths or (training_length,), "length_multiples": ()})
