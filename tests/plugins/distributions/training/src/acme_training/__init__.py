"""A third party's kinds for the trainer: everything it is extended by, with specs that import no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

import implicit_blocks as ib
from trainer.specs.evaluation_tasks import EvaluationTaskSpec
from trainer.specs.run import CallbackSpec, DataSpec, OptimizerSpec, ScheduleSpec


class ParitySpec(DataSpec):
    """Random bits, labeled with the parity of those so far."""

    kind: Literal["acme.parity"] = "acme.parity"
    period: PositiveInt = 1000
    """Sequences after which they repeat."""

    @property
    def vocab_size(self) -> int:
        """Two tokens."""
        return 2


class SignSpec(OptimizerSpec):
    """Steps along the signs of the gradient's running mean."""

    kind: Literal["acme.sign"] = "acme.sign"
    beta: float = 0.9
    """Decay rate of the mean."""


class HalvingSpec(ScheduleSpec):
    """Half the rate after every so many steps."""

    kind: Literal["acme.halving"] = "acme.halving"
    every: PositiveInt = 2
    """Steps."""

    def check(self, total_steps: int) -> None:
        """Refuse a run in which nothing is ever halved."""
        if total_steps <= self.every:
            raise ValueError(f"a run of {total_steps} steps never halves its rate; lower every {self.every}")


class DiarySpec(CallbackSpec):
    """Write down what happens."""

    kind: Literal["acme.diary"] = "acme.diary"
    file: str = "diary.txt"
    """In the run's folder."""


class FragileSpec(CallbackSpec):
    """Fail after some step."""

    kind: Literal["acme.fragile"] = "acme.fragile"
    after: NonNegativeInt = 0
    """Steps that go well."""


class RhymeSpec(EvaluationTaskSpec):
    """The last words of verses."""

    kind: Literal["acme.rhyme"] = "acme.rhyme"
    file: str = "verses.jsonl"
    """In the folder of data: objects with a `verse` and its last `word`."""
    columns: ClassVar[dict[str, str]] = {"acc": "rhymes"}


@ib.hookimpl
def register_components(add):
    add("data", ParitySpec, "acme_training.parts:Parity")
    add("optimizer", SignSpec, "acme_training.parts:build_sign")
    add("schedule", HalvingSpec, "acme_training.parts:Halving")
    add("callback", DiarySpec, "acme_training.parts:Diary")
    add("callback", FragileSpec, "acme_training.parts:Fragile")
    add("evaluation_task", RhymeSpec, "acme_training.rhyme:build_rhyme")
