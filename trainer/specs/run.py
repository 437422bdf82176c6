"""The run spec: model, data, training, phases, evaluation, callbacks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator

from implicit_blocks import registry
from implicit_blocks.specs import BaseRunSpec, ModelSpec, Spec, field_error
from trainer.specs.callbacks import (
    BenchmarksSpec,
    CallbackSpec,
    EarlyStoppingSpec,
    ProfileSpec,
    StopWhenSpec,
    TensorBoardSpec,
    WandbSpec,
)
from trainer.specs.data import (
    CatbAbISpec,
    ChatSpec,
    DataSpec,
    MixtureSourceSpec,
    MixtureSpec,
    Probability,
    StreamSpec,
    TokensSpec,
    WordProblemSpec,
)
from trainer.specs.divided import check_divided
from trainer.specs.generated import MazeSpec, StateTrackingSpec, SudokuSpec
from trainer.specs.optimizers import AdamWSpec, MuonSpec, OptimizerSpec, TorchOptimizerSpec
from trainer.specs.phases import Phase, PhaseSpec, change_sections, plan, steps_of_tokens
from trainer.specs.schedules import (
    ConstantSpec,
    CosineSpec,
    LinearSpec,
    ScheduleSpec,
    WarmupConstantSqrtSpec,
    WarmupLinearSpec,
    WSDSpec,
    steps_of,
    tokens_of,
)
from trainer.specs.training import EMASpec, Seed, TrainingSpec
from trainer.specs.transformers_model import TransformersSpec

__all__ = [
    "AdamWSpec",
    "BenchmarksSpec",
    "CallbackSpec",
    "CatbAbISpec",
    "ChatSpec",
    "ConstantSpec",
    "CosineSpec",
    "DataSpec",
    "EMASpec",
    "EarlyStoppingSpec",
    "EvaluationSpec",
    "LinearSpec",
    "MazeSpec",
    "MixtureSourceSpec",
    "MixtureSpec",
    "MuonSpec",
    "OptimizerSpec",
    "Phase",
    "PhaseSpec",
    "ProfileSpec",
    "RunSpec",
    "ScheduleSpec",
    "StateTrackingSpec",
    "StopWhenSpec",
    "StreamSpec",
    "SudokuSpec",
    "TensorBoardSpec",
    "TokensSpec",
    "TorchOptimizerSpec",
    "TrainingSpec",
    "TransformersSpec",
    "WSDSpec",
    "WandbSpec",
    "WarmupConstantSqrtSpec",
    "WarmupLinearSpec",
    "WordProblemSpec",
]


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


class RunSpec(BaseRunSpec):
    """Complete specification of a training run."""

    kind: Literal["run"] = "run"
    data: DataSpec
    """Training data."""
    training: TrainingSpec
    """Training settings."""
    phases: tuple[PhaseSpec, ...] = ()
    """Changes of solver, gradient, batch and data during training; empty: one phase."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Evaluation during training and at the end."""
    callbacks: tuple[CallbackSpec, ...] = ()
    """Code called during training."""

    @property
    def final_model(self) -> ModelSpec:
        """Model spec of the last phase."""
        return self.phase_models()[-1][1]

    @property
    def total_steps(self) -> int:
        """Number of steps of the run."""
        return self.phase_specs()[-1].last_step

    @property
    def total_tokens(self) -> int:
        """Number of training tokens of the run, over all phases."""
        return sum(
            (phase.last_step - phase.first_step) * phase.training.batch_size * phase.data.seq_len
            for phase in self.phase_specs()
        )

    @property
    def total_sequences(self) -> int:
        """Number of training sequences of the run, over all phases."""
        return sum(
            (phase.last_step - phase.first_step) * phase.training.batch_size for phase in self.phase_specs()
        )

    def phase_specs(self) -> list[Phase]:
        """Return the resolved phases."""
        return plan(self.phases, model=self.model, training=self.training, data=self.data)

    def phase_models(self) -> list[tuple[str, ModelSpec]]:
        """Return a title, the name and the steps, and the model of each phase; without phases of the run.

        The steps of a run of epochs depend on its data: the titles have the ends as the spec gives them.
        """
        if self.training.epochs is None:
            phases = self.phase_specs()
            titles = [f"{each.name}: steps {each.first_step + 1:,} to {each.last_step:,}" for each in phases]
            models = [each.model for each in phases]
        else:
            titles = [_title(phase) for phase in self.phases]
            sections = change_sections(self.phases, model=self.model, training=self.training, data=self.data)
            models = [model for model, _, _ in sections]
        if len(models) < 2:
            return [("training", models[0] if models else self.model)]
        return list(zip(titles, models, strict=True))

    def schedule_spec(self) -> ScheduleSpec:
        """Return the schedule with spans in tokens converted to steps."""
        phases = self.phase_specs()

        def steps(tokens: int, *, from_the_end: bool) -> int:
            return steps_of_tokens(tokens, phases, from_the_end=from_the_end)

        return self.training.schedule.in_steps(steps)

    @property
    def ema_start(self) -> int:
        """Number of steps before the averaging of the weights begins."""
        start = 0 if self.training.ema is None else self.training.ema.start
        if isinstance(start, str):
            return steps_of_tokens(tokens_of(start), self.phase_specs())
        return steps_of(start, self.total_steps)

    def require_shares(self, ranks: int) -> None:
        """Reject a number of processes that does not divide every phase's batch size.

        Raises:
            ValueError: names the phase if there are several.

        """
        shares = self.training.distributed.batch_shares(ranks)
        for phase in self.phase_specs():
            try:
                phase.training.share(shares)
            except ValueError as error:
                raise ValueError(f"phase {phase.name!r}: {error}" if self.phases else str(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _vocabulary_of_the_data(cls, value: Any) -> Any:
        """Set a model's missing vocab_size to that of its data, if the data determine it."""
        if not isinstance(value, Mapping):
            return value
        model, data = value.get("model"), value.get("data")
        if not isinstance(model, Mapping) or model.get("vocab_size") is not None:
            return value
        if model.get("kind") not in registry.kinds("model"):
            return value
        try:
            size = DataSpec.model_validate(data).vocab_size
        except ValueError:  # reported by the validation of `data`; an error for vocab_size would distract
            size = 1
        if size is None or "vocab_size" not in registry.entry("model", model["kind"]).spec.model_fields:
            return value
        return {**value, "model": {**model, "vocab_size": size}}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        needed, rows = self.data.vocab_size, getattr(self.model, "vocab_size", None)
        if needed is not None and rows is not None and rows < needed:
            message = f"the data have {needed} token IDs; use {needed} or more, or omit vocab_size"
            raise field_error(message, "model", "vocab_size", value=rows)
        if self.training.epochs is None:
            self._require_fitting_steps()
        else:
            self._require_epochs(self.training.epochs)
        if self.training.evaluate_every is None:
            for index, callback in enumerate(self.callbacks):
                if isinstance(callback, EarlyStoppingSpec):
                    message = "early_stopping needs evaluations during the run; set training.evaluate_every"
                    raise field_error(message, "callbacks", index, value=callback)
        shortest = min(self.evaluation.at(self.data.seq_len).lengths)
        if max(self.training.distributed.tensor, self.training.distributed.context) > 1:
            check_divided(self)
        if shortest < self.evaluation.last_tokens:
            message = f"the shortest evaluation length is {shortest} tokens; use {shortest} or less"
            raise field_error(message, "evaluation", "last_tokens", value=self.evaluation.last_tokens)
        return self

    def _require_fitting_steps(self) -> None:
        """Reject a schedule or an averaging that is longer than the run."""
        total_steps, training = self.total_steps, self.training
        try:
            self.schedule_spec().check(total_steps)
        except ValueError as error:
            raise field_error(str(error), "training", "schedule", value=training.schedule) from None
        if training.ema is not None and self.ema_start >= total_steps:
            message = f"the run ends at step {total_steps}, before the averaging begins; begin it earlier"
            raise field_error(message, "training", "ema", "start", value=training.ema.start)

    def _require_epochs(self, epochs: float) -> None:
        """Reject epochs of data that have none, or that a phase changes."""
        if not self.data.finite:
            message = (
                f"data of kind {self.data.kind!r} are endless or of unknown size and have no epochs, got "
                f"{epochs:g}; set training.max_steps or training.max_tokens instead"
            )
            raise field_error(message, "training", "epochs", value=epochs)
        for index, phase in enumerate(self.phases):
            if phase.data:
                message = (
                    f"phase {phase.name!r} changes the data, so that training.epochs={epochs:g} is "
                    "ambiguous; set training.max_steps instead"
                )
                raise field_error(message, "phases", index, "data", value=phase.data)


def _title(phase: PhaseSpec) -> str:
    """Return the name of a phase, and its end as given: a step, a share, tokens, or that of the run."""
    until = phase.until
    if until is None:
        return f"{phase.name}: to the end"
    if isinstance(until, float):
        return f"{phase.name}: until {until:.4g} of the run"
    return f"{phase.name}: until {until if isinstance(until, str) else f'step {until:,}'}"
