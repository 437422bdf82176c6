"""Callback sections of a run spec: code called at a run's steps, evaluations and checkpoints."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from implicit_blocks.specs import ComponentSpec
from trainer.specs.evaluation_tasks import EvaluationTaskSpec


class CallbackSpec(ComponentSpec):
    """Base class of all callback specs."""

    family: ClassVar[str] = "callback"

    required: bool = True
    """Whether a failure of the callback ends the run after a save; false: a failed callback is removed with a
    warning and training continues."""


class StopWhenSpec(CallbackSpec):
    """End the run early, with the final evaluation, once a metric has stayed past a limit."""

    kind: Literal["stop_when"] = "stop_when"
    value: str
    """Metric to watch: a column of metrics.jsonl, such as loss or accuracy_last."""
    above: float | None = None
    """Stop when the metric is above this limit. Give either `above` or `below`."""
    below: float | None = None
    """Stop when the metric is below this limit."""
    steps: PositiveInt = 1
    """Number of consecutive steps for which the metric must be past the limit."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("stop_when needs exactly one limit; give either above or below")
        return self


class EarlyStoppingSpec(CallbackSpec):
    """End the run early once a metric of the evaluations has stopped improving."""

    kind: Literal["early_stopping"] = "early_stopping"
    metric: str = "loss"
    """Column of evaluations.jsonl, such as loss or accuracy_last. Accuracies and shares of converged tokens
    improve by growing, all other metrics by falling."""
    set: str | None = None
    """Name of the evaluation set; null: the first one."""
    patience: PositiveInt = 3
    """Number of consecutive evaluations without an improvement after which the run ends."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest difference from the best value so far that counts as an improvement."""


class BenchmarksSpec(CallbackSpec):
    """Run evaluation tasks at every evaluation of the model; scores are written to benchmarks.jsonl."""

    kind: Literal["benchmarks"] = "benchmarks"
    tasks: tuple[EvaluationTaskSpec, ...]
    """Evaluation tasks to run."""
    data: str = "data"
    """Directory of the task files."""
    tokenizer: str
    """A tokenizer.json, a directory that contains one, or `bytes`."""
    limit: PositiveInt | None = None
    """Maximum number of items per task, taken from the start; null: all items."""
    batch_size: PositiveInt = 16
    """Sequences per forward pass."""
    max_length: PositiveInt | None = None
    """Maximum request length in tokens; longer contexts are truncated on the left; null: the model's
    limit."""


class TensorBoardSpec(CallbackSpec):
    """Write the metrics as TensorBoard scalars to the `tensorboard` directory of the run."""

    kind: Literal["tensorboard"] = "tensorboard"
    every: PositiveInt = 1
    """Steps between logged training metrics; every evaluation is logged."""


class WandbSpec(CallbackSpec):
    """Send the metrics to Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = "implicit_blocks"
    """Name of the project."""
    entity: str | None = None
    """User or team; null: the logged-in user."""
    name: str | None = None
    """Display name of the run; null: the name of the run directory."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` stores the metrics in the run directory for `wandb sync`."""
    every: PositiveInt = 1
    """Steps between logged training metrics; every evaluation is logged."""


class ProfileSpec(CallbackSpec):
    """Trace some steps with torch's profiler; traces are written to the `profiles` directory of the run."""

    kind: Literal["profile"] = "profile"
    start: PositiveInt = 10
    """First traced step. The first steps of a run are not representative."""
    steps: PositiveInt = 3
    """Number of traced steps."""
