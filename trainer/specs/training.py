"""The `training` section: length of the run, batch, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import ComponentSpec, Spec, field_error
from trainer.optim.schedules import steps_of
from trainer.specs.distributed import DistributedSpec
from trainer.specs.init_from import InitFrom
from trainer.specs.spans import Span, tokens_of

Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
CheckpointActivations = Literal["none", "steps", "layers"]


class OptimizerSpec(ComponentSpec):
    """Base class of all optimizer specs."""

    family: ClassVar[str] = "optimizer"
    builds: ClassVar[str | None] = "torch.optim:Optimizer"

    learning_rate: PositiveFloat
    """Peak learning rate."""


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov & Hutter, 2019).

    Weight decay applies to matrices, not to norms, biases, gains, or the A, dt and D of an SSM.
    """

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the two moments."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay coefficient, multiplied by the learning rate."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator for numerical stability."""


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


class WarmupConstantSqrtSpec(ScheduleSpec):
    """Linear warmup, constant rate, then a ``1 - sqrt`` decay."""

    from_the_end: ClassVar[frozenset[str]] = frozenset({"decay"})

    kind: Literal["warmup_constant_sqrt"] = "warmup_constant_sqrt"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    decay: Span = 0.2
    """Length of the decay at the end of the run: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 1e-5
    """Learning rate of the last step."""

    def check(self, total_steps: int) -> None:
        """Reject a warmup and a decay that do not fit into the run."""
        warmup, decay = steps_of(self.warmup, total_steps), steps_of(self.decay, total_steps)
        if warmup + decay > total_steps:
            raise ValueError(
                f"a warmup of {warmup} steps and a decay of {decay} don't fit into {total_steps} steps; "
                "shorten them, or use shares of the run such as 0.1"
            )


class WarmupLinearSpec(ScheduleSpec):
    """Linear warmup, then linear decay."""

    kind: Literal["warmup_linear"] = "warmup_linear"
    warmup: Span = 0.1
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 0.0
    """Learning rate one step after the last, so that no step has a learning rate of 0."""

    def check(self, total_steps: int) -> None:
        """Reject a warmup that does not fit into the run."""
        warmup = steps_of(self.warmup, total_steps)
        if warmup > total_steps:
            raise ValueError(
                f"a warmup of {warmup} steps doesn't fit into {total_steps} steps; shorten it, or use a "
                "share of the run such as 0.1"
            )


class TrainingSpec(Spec):
    """The `training` section."""

    max_steps: PositiveInt | None = None
    """Length of the run in steps."""
    max_tokens: PositiveInt | None = None
    """Length of the run in tokens, rounded up to whole steps. If both are set, the shorter one applies."""
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
    loader_threads: NonNegativeInt = 1
    """Threads that prepare the next batches during a step; 0: none. The batches do not depend on it."""
    log_every: PositiveInt = 10
    """Steps between progress lines when no terminal shows a bar; the metrics contain every step."""
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
        if self.max_steps is None and self.max_tokens is None:
            raise ValueError("the length of the run is missing; give max_steps or max_tokens")
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
