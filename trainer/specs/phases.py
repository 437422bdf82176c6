"""Phases of a run: changes of solver, gradient, batch and data during training; the weights carry over.

Steps are the unit of time: a share of the run is a share of its steps, for phases and schedules alike, even
if the batch size changes. Tokens are counted over the phases, each with its own batch size and length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.specs import ModelSpec, Spec, field_error, merge, merge_errors
from implicit_blocks.specs.base import validate
from trainer.specs.data import DataSpec
from trainer.specs.schedules import Until, steps_of, tokens_of
from trainer.specs.training import TrainingSpec

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


def plan(
    phases: Sequence[PhaseSpec], *, model: ModelSpec, training: TrainingSpec, data: DataSpec
) -> list[Phase]:
    """Resolve the phases of a run; a run without phases has a single one named ``train``.

    The last phase ends with the run. A run measured in tokens ends with the step that reaches the token
    count.

    Raises:
        ValidationError: phases overlap, do not cover the run, or change a fixed field; located from the run
            spec.

    """
    if not phases:
        total = min(_lengths(training, lambda tokens: -(-tokens // (training.batch_size * data.seq_len))))
        return [Phase("train", 0, total, model, training, data)]
    changed = change_sections(phases, model=model, training=training, data=data)
    tokens_per_step = [own.batch_size * read.seq_len for _, own, read in changed]
    total = min(_lengths(training, lambda tokens: _steps_with(tokens, phases, tokens_per_step)))
    ends = _ends(phases, tokens_per_step, total)
    return [
        Phase(phase.name, start, end, *own)
        for phase, start, end, own in zip(phases, [0, *ends], ends, changed, strict=False)
    ]


def change_sections(
    phases: Sequence[PhaseSpec], *, model: ModelSpec, training: TrainingSpec, data: DataSpec
) -> list[tuple[ModelSpec, TrainingSpec, DataSpec]]:
    """Return the model, training and data of each phase.

    Raises:
        ValidationError: phases have the same name, or change a fixed field.

    """
    changed = []
    for index, phase in enumerate(phases):
        if any(phase.name == other.name for other in phases[:index]):
            message = "phase names must be unique; rename this phase"
            raise field_error(message, "phases", index, "name", value=phase.name)
        try:
            changed.append(
                (
                    _changed("model", model, phase.model, model.changeable),
                    _changed_training(training, phase),
                    _changed("data", data, phase.data, data.changeable),
                )
            )
        except ValidationError as error:
            raise merge_errors([error], under=("phases", index)) from None
    return changed


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
