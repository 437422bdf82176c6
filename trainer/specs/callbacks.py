"""What else happens while a run trains: code of others, called at its steps, evaluations, checkpoints."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from implicit_blocks.specs import ComponentSpec
from trainer.specs.evaluation_tasks import EvaluationTaskSpec


class CallbackSpec(ComponentSpec):
    """Base of all callbacks' specs."""

    family: ClassVar[str] = "callback"

    required: bool = True
    """Whether its failure ends the run, saved; false: it is left out from there on, with a warning."""


class StopWhenSpec(CallbackSpec):
    """End the run early, evaluated as at its end, once a value of the metrics has stayed past a limit."""

    kind: Literal["stop_when"] = "stop_when"
    value: str
    """Which: a column of metrics.jsonl, such as loss or accuracy_last."""
    above: float | None = None
    """The limit that it must be above ..."""
    below: float | None = None
    """... or below; give one of the two."""
    steps: PositiveInt = 1
    """For so many steps in a row."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("stop_when takes one limit; give either above or below")
        return self


class BenchmarksSpec(CallbackSpec):
    """Ask the model evaluation tasks whenever it is evaluated; the scores go to benchmarks.jsonl."""

    kind: Literal["benchmarks"] = "benchmarks"
    tasks: tuple[EvaluationTaskSpec, ...]
    """What it is asked."""
    data: str = "data"
    """Folder of the tasks' files."""
    tokenizer: str
    """A tokenizer.json, a folder with one, or `bytes`."""
    limit: PositiveInt | None = None
    """The first so many items of each task only; null: all."""
    batch_size: PositiveInt = 16
    """Sequences that go through the model at once."""
    max_length: PositiveInt | None = None
    """Tokens of a request at most, longer contexts are cut on the left; null: no limit but the model's."""


class TensorBoardSpec(CallbackSpec):
    """Write the metrics as TensorBoard's scalars into the folder `tensorboard` of the run."""

    kind: Literal["tensorboard"] = "tensorboard"
    every: PositiveInt = 1
    """Steps between those written; evaluations all are."""


class WandbSpec(CallbackSpec):
    """Send the metrics to Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = "implicit_blocks"
    """Where they appear."""
    entity: str | None = None
    """User or team; null: the one logged in."""
    name: str | None = None
    """What the run is called there; null: as its folder."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """Offline keeps them in the run's folder, for `wandb sync`."""
    every: PositiveInt = 1
    """Steps between those sent; evaluations all are."""


class ProfileSpec(CallbackSpec):
    """Trace some steps with torch's profiler, into the folder `profiles` of the run."""

    kind: Literal["profile"] = "profile"
    start: PositiveInt = 10
    """First step traced; the first steps of a run are not like the others."""
    steps: PositiveInt = 3
    """How many."""
