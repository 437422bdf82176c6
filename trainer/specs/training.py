"""How the model is trained: length of the run, batch, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import ComponentSpec, Spec, field_error
from trainer.optim.schedules import steps_of
from trainer.specs.distributed import DistributedSpec
from trainer.specs.init_from import Start
from trainer.specs.spans import Span, tokens_of

Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
CheckpointActivations = Literal["none", "steps", "layers"]


class OptimizerSpec(ComponentSpec):
    """Base of all optimizers' specs."""

    family: ClassVar[str] = "optimizer"
    builds: ClassVar[str | None] = "torch.optim:Optimizer"

    learning_rate: PositiveFloat
    """Peak learning rate."""


class AdamWSpec(OptimizerSpec):
    """AdamW: Loshchilov & Hutter, 2019. Matrices decay; norms, biases, gains, an SSM's A, dt, D don't."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the two moments."""
    weight_decay: NonNegativeFloat = 0.1
    """Share of a weight removed a step, in units of the learning rate."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class ScheduleSpec(ComponentSpec):
    """Base of all schedules' specs: the learning rate as a function of the step."""

    family: ClassVar[str] = "schedule"
    builds: ClassVar[str | None] = "trainer.optim.schedules:Schedule"
    from_the_end: ClassVar[frozenset[str]] = frozenset()
    """Fields that are spans at the end of the run; others begin with it. It matters where they are given in
    tokens and the batch changes: builders get steps, or shares."""

    def in_steps(self, steps: Callable[..., int]) -> Self:
        """Return the same with steps for tokens, of which ``steps(tokens, from_the_end=…)`` have so many."""
        spans = {name: getattr(self, name) for name in type(self).model_fields}
        counted = {
            name: steps(tokens_of(span), from_the_end=name in self.from_the_end)
            for name, span in spans.items()
            if isinstance(span, str) and span.endswith(" tokens")
        }
        return self.model_copy(update=counted)

    def check(self, total_steps: int) -> None:
        """Refuse a run that is too short.

        Raises:
            ValueError: says what doesn't fit.

        """
        return None


class WarmupConstantSqrtSpec(ScheduleSpec):
    """Linear warm-up, constant, then a ``1 - sqrt`` decay."""

    from_the_end: ClassVar[frozenset[str]] = frozenset({"decay"})

    kind: Literal["warmup_constant_sqrt"] = "warmup_constant_sqrt"
    warmup: Span = 0.01
    """Length of the warm-up: steps, a share of the run, or tokens."""
    decay: Span = 0.2
    """Length of the decay, at the end of the run: the same."""
    final_learning_rate: NonNegativeFloat = 1e-5
    """Rate of the last step."""

    def check(self, total_steps: int) -> None:
        """Refuse a warm-up and a decay that don't fit."""
        warmup, decay = steps_of(self.warmup, total_steps), steps_of(self.decay, total_steps)
        if warmup + decay > total_steps:
            raise ValueError(
                f"a warm-up of {warmup} steps and a decay of {decay} don't fit into {total_steps} steps; "
                "shorten them, or give shares of the run such as 0.1"
            )


class WarmupLinearSpec(ScheduleSpec):
    """Linear warm-up, then a straight line down."""

    kind: Literal["warmup_linear"] = "warmup_linear"
    warmup: Span = 0.1
    """Length of the warm-up: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 0.0
    """Where the line ends, a step after the last one: no step is wasted at a rate of 0."""

    def check(self, total_steps: int) -> None:
        """Refuse a warm-up that doesn't fit."""
        warmup = steps_of(self.warmup, total_steps)
        if warmup > total_steps:
            raise ValueError(
                f"a warm-up of {warmup} steps doesn't fit into {total_steps} steps; "
                "shorten it, or give a share of the run such as 0.1"
            )


class TrainingSpec(Spec):
    """The `training` section."""

    max_steps: PositiveInt | None = None
    """Length of the run in steps."""
    max_tokens: PositiveInt | None = None
    """Length of the run in tokens, rounded up to whole steps. With both, the shorter one holds."""
    init_from: Start | None = None
    """Other weights to begin with than fresh ones: a run (its newest checkpoint), a checkpoint, a folder for
    transformers, a file of safetensors; or a mapping with that as `path`. Null: fresh ones."""
    batch_size: PositiveInt
    """Sequences in a step, over all ranks and micro-batches together."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that a rank takes at once; divides a larger `batch_size`. Null: its whole share."""
    seed: Seed = 0
    """Of the initial weights, the data and dropout."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null: not clipped. The paper doesn't state its own."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; weights and residuals are float32 in any case."""
    compile_layers: bool = False
    """Compile the model's layers: minutes at the first step, then faster steps on a GPU."""
    cuda_graphs: bool = False
    """Record the model's map as CUDA graphs: an iteration of the search is one launch, worth it where many
    small kernels keep the host busy. Weights and gradients are kept once more, in the type of their use;
    off a GPU, and with sharded weights, which move, it changes nothing."""
    distributed: DistributedSpec = DistributedSpec()
    """How the run is laid out over its processes."""
    checkpoint_activations: CheckpointActivations = "none"
    """What is computed again in backward instead of kept, for one more forward pass of what is
    differentiated: nothing; each step of the map, of which only the start is kept; or each layer of each
    step, which holds one layer's activations at a time instead of a whole step's."""
    optimizer: OptimizerSpec
    """What makes a step of a gradient."""
    schedule: ScheduleSpec = WarmupConstantSqrtSpec()
    """Learning rate as a function of the step."""
    loader_threads: NonNegativeInt = 1
    """Threads that prepare the next batches while a step runs; 0: none. The batches are the same."""
    log_every: PositiveInt = 10
    """Steps between lines of progress, where no terminal shows a bar; the metrics have every step."""
    evaluate_every: PositiveInt | None = None
    """Steps between evaluations; null: at the end only."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints; null: at the end only."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of so many steps stay too; null: only the newest."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """What a checkpoint that can't be written (a full disk) means for the run; those before it stay whole."""
    export_every: PositiveInt | None = None
    """Steps between exports of the model into the folder `exports` of the run, and one at the end: folders
    for transformers' from_pretrained, or model.safetensors without it; null: none."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What a loss or a gradient that is not a number means: the end of the run, or a batch without an update.
    Either way the weights stay as they were, and the positions of the batch's samples are said."""
    max_consecutive_skips: PositiveInt = 10
    """Batches in a row that may be skipped; one more ends the run."""
    peak_flops: PositiveFloat | None = None
    """FLOP/s that one device can do at most, for utilizations; null: from a table of known devices."""
    threads: PositiveInt | None = None
    """CPU threads; null: torch's choice. Results are the same to the last bit only for equal numbers."""

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
        """Sequences that go through the model together."""
        return min(self.micro_batch_size or self.batch_size, self.batch_size)

    def share(self, ranks: int) -> int:
        """Sequences of a step that each of the ranks takes.

        Raises:
            ValueError: they can't be shared equally.

        """
        if self.batch_size % ranks:
            raise ValueError(
                f"training.batch_size {self.batch_size} can't be shared equally by {ranks} processes; choose "
                "a multiple of their number, or another number of processes"
            )
        return self.batch_size // ranks
