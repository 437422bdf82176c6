"""The `training` section: length of the run, batch, optimizer, schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import Spec, field_error
from trainer.specs.distributed import DistributedSpec
from trainer.specs.optimizers import Beta, OptimizerSpec
from trainer.specs.schedules import ScheduleSpec, Span, WarmupConstantSqrtSpec

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
