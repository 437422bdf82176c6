"""The run spec: model, data, training, phases, evaluation, callbacks. Imports no torch.

Phases change solver, gradient, batch and data during training; the weights carry over. Steps are the unit of
time: a share of the run is a share of its steps, for phases and schedules alike, even if the batch size
changes. Tokens are counted over the phases, each with its own batch size and length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.specs import BaseRunSpec, ModelSpec, Spec, field_error, merge, merge_errors
from implicit_blocks.specs.base import validate
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
    StreamSpec,
    TokensSpec,
)
from trainer.specs.generated import MazeSpec, StateTrackingSpec, SudokuSpec
from trainer.specs.groups import WordProblemSpec
from trainer.specs.optimizers import AdamWSpec, MuonSpec, OptimizerSpec, TorchOptimizerSpec
from trainer.specs.parallel_checks import check_divided
from trainer.specs.training import (
    ConstantSpec,
    CosineSpec,
    EMASpec,
    EvaluationSpec,
    LinearSpec,
    RewarmedSpec,
    ScheduleSpec,
    TrainingSpec,
    Until,
    WarmupConstantSqrtSpec,
    WarmupLinearSpec,
    WSDSpec,
    steps_of,
    tokens_of,
)
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
    "RewarmedSpec",
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


_Section = TypeVar("_Section", bound=Spec)
_CHANGEABLE = {"batch_size", "micro_batch_size", "max_grad_norm", "checkpoint_activations", "optimizer"}


class PhaseSpec(Spec):
    """One phase: overrides of the run's `model`, `training` and `data` sections."""

    name: str
    """Name of the phase in logs and metrics."""
    until: Until | None = None
    """End of the phase, counted from the start of the run: a step, a share of the run's steps, or a number of
    tokens (`2e9 tokens`), rounded up to whole steps. Null: the end of the run, only allowed in the last
    phase."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the model's solver, gradient, stopping and at_evaluation."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Overrides of batch_size, micro_batch_size, max_grad_norm, checkpoint_activations and
    optimizer.learning_rate."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the data, where their kind supports it: seq_len and identity_probability of word problems,
    seq_len and tasks of catbAbI."""


class Phase(NamedTuple):
    """A resolved phase: steps [first_step, last_step) and the specs that apply to them."""

    name: str
    first_step: int
    last_step: int
    model: ModelSpec
    training: TrainingSpec
    data: DataSpec


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
        """Return the resolved phases; a run without phases has a single one named ``train``.

        The last phase ends with the run. A run measured in tokens ends with the step that reaches the token
        count.

        Raises:
            ValidationError: phases overlap, do not cover the run, or change a fixed field; located from the
                run spec.

        """
        phases, training = self.phases, self.training
        if not phases:
            each = training.batch_size * self.data.seq_len
            total = min(_lengths(training, lambda tokens: -(-tokens // each)))
            return [Phase("train", 0, total, self.model, training, self.data)]
        changed = self.changed_sections()
        tokens_per_step = [own.batch_size * read.seq_len for _, own, read in changed]
        total = min(_lengths(training, lambda tokens: _steps_with(tokens, phases, tokens_per_step)))
        ends = _ends(phases, tokens_per_step, total)
        return [
            Phase(phase.name, start, end, *own)
            for phase, start, end, own in zip(phases, [0, *ends], ends, changed, strict=False)
        ]

    def changed_sections(self) -> list[tuple[ModelSpec, TrainingSpec, DataSpec]]:
        """Return the model, training and data of each phase; without phases an empty list.

        Raises:
            ValidationError: phases have the same name, or change a fixed field.

        """
        changed = []
        for index, phase in enumerate(self.phases):
            if any(phase.name == other.name for other in self.phases[:index]):
                message = "phase names must be unique; rename this phase"
                raise field_error(message, "phases", index, "name", value=phase.name)
            try:
                model = _changed("model", self.model, phase.model, self.model.changeable)
                training = _changed_training(self.training, phase)
                changed.append(
                    (model, training, _changed("data", self.data, phase.data, self.data.changeable))
                )
            except ValidationError as error:
                raise merge_errors([error], under=("phases", index)) from None
        return changed

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
            models = [model for model, _, _ in self.changed_sections()]
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


# ------------------------------------------------------------------------------------ phases


def steps_of_tokens(tokens: int, phases: Sequence[Phase], *, from_the_end: bool = False) -> int:
    """Return the number of steps, rounded up, at the start or the end of a run that contain `tokens` tokens.

    If the run is too short, its last phase (or its first, counting from the end) is extrapolated.
    """
    steps, each = 0, 1
    for phase in reversed(phases) if from_the_end else phases:
        each, span = phase.training.batch_size * phase.data.seq_len, phase.last_step - phase.first_step
        if tokens <= span * each:
            break
        steps, tokens = steps + span, tokens - span * each
    return steps + -(-tokens // each)


def _lengths(training: TrainingSpec, steps_with: Callable[[int], int]) -> list[int]:
    """Return the lengths of the run in steps; the shortest applies."""
    if training.epochs is not None:
        raise ValueError(
            f"the number of steps in training.epochs={training.epochs:g} depends on the data, which are read "
            "when the run starts; show it by python -m trainer --dry-run, or set training.max_steps instead"
        )
    lengths = [] if training.max_steps is None else [training.max_steps]
    return lengths if training.max_tokens is None else [*lengths, steps_with(training.max_tokens)]


def _steps_with(tokens: int, phases: Sequence[PhaseSpec], tokens_per_step: Sequence[int]) -> int:
    """Return the smallest number of steps for which the run has at least `tokens` tokens."""
    # Bisection, because the ends of phases given as a share depend on the length of the run.
    short, enough = 0, -(-tokens // min(tokens_per_step))
    while enough - short > 1:
        middle = (short + enough) // 2
        seen = sum(
            (end - start) * each
            for (start, end), each in zip(
                _spans(phases, tokens_per_step, middle), tokens_per_step, strict=True
            )
        )
        short, enough = (short, middle) if seen >= tokens else (middle, enough)
    return enough


def _spans(
    phases: Sequence[PhaseSpec], tokens_per_step: Sequence[int], total_steps: int
) -> Iterator[tuple[int, int]]:
    """Yield the steps [start, end) of each phase, clipped to a run of `total_steps`."""
    start, tokens = 0, 0
    for index, each in enumerate(tokens_per_step):
        end = _end(phases, index, start=start, tokens=tokens, each=each, total_steps=total_steps)
        end = min(max(end, start), total_steps) if index + 1 < len(phases) else total_steps
        yield start, end
        start, tokens = end, tokens + (end - start) * each


def _end(
    phases: Sequence[PhaseSpec], index: int, *, start: int, tokens: int, each: int, total_steps: int
) -> int:
    """Return the step at which a phase ends according to its spec, which may be beyond the end of the run.

    The phase begins at step ``start``, after ``tokens`` tokens, and takes ``each`` tokens per step. Shares
    are rounded such that every phase has at least one step.
    """
    until, left = phases[index].until, len(phases) - index - 1
    if until is None:
        return total_steps
    if isinstance(until, str):
        return start + max(0, -(-(tokens_of(until) - tokens) // each))
    end = steps_of(until, total_steps)
    return min(max(end, start + 1), total_steps - left) if isinstance(until, float) and left else end


def _ends(phases: Sequence[PhaseSpec], tokens_per_step: Sequence[int], total_steps: int) -> list[int]:
    """Return the end of each phase and reject phases that do not cover the run."""
    if len(phases) > total_steps:
        message = (
            f"{len(phases)} phases don't fit into a run of {total_steps} steps; use at least {len(phases)} "
            "steps, or remove phases"
        )
        raise field_error(message, "phases", value=phases)
    ends: list[int] = []
    start = tokens = 0
    for index, (phase, each) in enumerate(zip(phases, tokens_per_step, strict=True)):
        end = _end(phases, index, start=start, tokens=tokens, each=each, total_steps=total_steps)
        if complaint := _end_error(phases, index, start=start, end=end, total_steps=total_steps):
            raise field_error(complaint, "phases", index, "until", value=phase.until)
        ends.append(end)
        start, tokens = end, tokens + (end - start) * each
    return ends


def _end_error(
    phases: Sequence[PhaseSpec], index: int, *, start: int, end: int, total_steps: int
) -> str | None:
    """Return why the end of a phase is invalid, or None."""
    phase, last = phases[index], index == len(phases) - 1
    place = f"{end} ({phase.until})" if isinstance(phase.until, str) else str(end)
    if not last and phase.until is None:
        return "only the last phase may omit until; set a step, a share or a number of tokens"
    if not last and end >= total_steps:
        return (
            f"phase {phase.name!r} ends at step {place} of {total_steps}, so the next phase never starts; "
            "end it earlier, use a share such as 0.5, or lengthen the run"
        )
    if last and end != total_steps:
        return f"the last phase ends at step {place} of {total_steps}; omit until"
    if index and _goes_back(phase.until, phases[index - 1].until, start, total_steps):
        return (
            f"phase {phase.name!r} ends at {phase.until}, but the previous phase ends at "
            f"{phases[index - 1].until}; phases must end in increasing order"
        )
    if end <= start:
        return f"phase {phase.name!r} starts at step {start} but ends at {place}; end it later"
    return None


def _goes_back(until: Until | None, before: Until | None, start: int, total_steps: int) -> bool:
    """Whether a share ends before the previous phase; rounding to at least one step would hide that."""
    if not isinstance(until, float):
        return False
    return until <= before if isinstance(before, float) else steps_of(until, total_steps) < start


def _changed_training(training: TrainingSpec, phase: PhaseSpec) -> TrainingSpec:
    optimizer = phase.training.get("optimizer", {})
    if isinstance(optimizer, Mapping):
        _refuse_others(optimizer, {"learning_rate"}, "training", "optimizer", what="the optimizer")
    return _changed("training", training, phase.training, _CHANGEABLE)


def _changed(section: str, spec: _Section, changes: Mapping[str, Any], allowed: Collection[str]) -> _Section:
    """Return a section of the run with a phase's overrides applied."""
    kind = f"of kind {getattr(spec, 'kind', None)!r}"
    what = {"model": f"a model {kind}", "data": f"data {kind}"}.get(section, section)
    _refuse_others(changes, allowed, section, what=what)
    try:
        return validate(type(spec), merge(spec.model_dump(), changes)) if changes else spec
    except ValidationError as error:
        raise merge_errors([error], under=(section,)) from None


def _refuse_others(changes: Mapping[str, Any], allowed: Collection[str], *where: str, what: str) -> None:
    for key, value in changes.items():
        if key not in allowed:
            message = f"a phase cannot change {key!r} of {what}; {did_you_mean(key, allowed)}"
            raise field_error(message, *where, key, value=value, of_key=True)
