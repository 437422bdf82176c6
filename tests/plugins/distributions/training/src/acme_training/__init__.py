"""A third party's kinds for every family of the trainer, with specs that import no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

import implicit_blocks as ib
from trainer.specs.evaluation_tasks import EvaluationTaskSpec
from trainer.specs.run import CallbackSpec, DataSpec, OptimizerSpec, ScheduleSpec


class ParitySpec(DataSpec):
    """Random bits labeled with their running parity."""

    kind: Literal["acme.parity"] = "acme.parity"
    period: PositiveInt = 1000
    """Number of different sequences."""

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size, 2."""
        return 2


class SignSpec(OptimizerSpec):
    """Steps along the signs of the running mean of the gradient."""

    kind: Literal["acme.sign"] = "acme.sign"
    beta: float = 0.9
    """Decay rate of the mean."""


class HalvingSpec(ScheduleSpec):
    """Halve the learning rate periodically."""

    kind: Literal["acme.halving"] = "acme.halving"
    every: PositiveInt = 2
    """Steps per halving."""

    def check(self, total_steps: int) -> None:
        """Check that the run reaches the first halving."""
        if total_steps <= self.every:
            raise ValueError(f"a run of {total_steps} steps never halves its rate; lower every {self.every}")


class DiarySpec(CallbackSpec):
    """Log the events of the run."""

    kind: Literal["acme.diary"] = "acme.diary"
    file: str = "diary.txt"
    """File in the run's directory."""


class FragileSpec(CallbackSpec):
    """Fail after a number of steps."""

    kind: Literal["acme.fragile"] = "acme.fragile"
    after: NonNegativeInt = 0
    """Number of steps before the failure."""


class RhymeSpec(EvaluationTaskSpec):
    """Predict the last words of verses."""

    kind: Literal["acme.rhyme"] = "acme.rhyme"
    file: str = "verses.jsonl"
    """File in the data directory: objects with a `verse` and its last `word`."""
    columns: ClassVar[dict[str, str]] = {"acc": "rhymes"}


@ib.hookimpl
def register_components(add):
    add("data", ParitySpec, "acme_training.parts:Parity")
    add("optimizer", SignSpec, "acme_training.parts:build_sign")
    add("schedule", HalvingSpec, "acme_training.parts:Halving")
    add("callback", DiarySpec, "acme_training.parts:Diary")
    add("callback", FragileSpec, "acme_training.parts:Fragile")
    add("evaluation_task", RhymeSpec, "acme_training.rhyme:build_rhyme")
