"""Phases of a run: how search, gradient, batch and data change on the way, the weights staying as they are.

Steps are the run's clock: a share of the run is a share of its steps, for phases as for schedules, however
the batch changes. Tokens are counted over the phases, each with its own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.specs import ModelSpec, Spec, field_error, merge, merge_errors
from implicit_blocks.specs.base import validate
from trainer.optim.schedules import steps_of
from trainer.specs.data import DataSpec
from trainer.specs.spans import Until, tokens_of
from trainer.specs.training import TrainingSpec

_Section = TypeVar("_Section", bound=Spec)
_CHANGEABLE = {"batch_size", "micro_batch_size", "max_grad_norm", "checkpoint_activations", "optimizer"}


class PhaseSpec(Spec):
    """One phase: what differs from the run's own `model`, `training` and `data` sections."""

    name: str
    """What records call it."""
    until: Until | None = None
    """Where it ends, counted from the start of the run: a step, a share of its steps, or a number of tokens
    (`2e9 tokens`), rounded up to whole steps. Null: the end of the run, so only in the last phase."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Changes to the model's solver, gradient, stopping and at_evaluation."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Changes to batch_size, micro_batch_size, max_grad_norm, checkpoint_activations and
    optimizer.learning_rate."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Changes to the data, where their kind allows any: the seq_len and identity_probability of word
    problems, the seq_len and tasks of catbAbI."""


class Phase(NamedTuple):
    """A phase worked out: steps [first_step, last_step), and the specs that hold there."""

    name: str
    first_step: int
    last_step: int
    model: ModelSpec
    training: TrainingSpec
    data: DataSpec


def plan(
    phases: Sequence[PhaseSpec], *, model: ModelSpec, training: TrainingSpec, data: DataSpec
) -> list[Phase]:
    """Work out the phases of a run; without any, one named ``train``.

    The last one ends where the run does. A run measured in tokens ends with the step that completes them.

    Raises:
        ValidationError: phases that overlap, end early or change what they can't; located from the run spec.

    """
    if not phases:
        total = min(_lengths(training, lambda tokens: -(-tokens // (training.batch_size * data.seq_len))))
        return [Phase("train", 0, total, model, training, data)]
    changed = []
    for index, phase in enumerate(phases):
        if any(phase.name == other.name for other in phases[:index]):
            message = "another phase has this name, and records tell phases by their names; give another"
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
    tokens_a_step = [own.batch_size * read.seq_len for _, own, read in changed]
    total = min(_lengths(training, lambda tokens: _steps_with(tokens, phases, tokens_a_step)))
    ends = _ends(phases, tokens_a_step, total)
    return [
        Phase(phase.name, start, end, *own)
        for phase, start, end, own in zip(phases, [0, *ends], ends, changed, strict=False)
    ]


def steps_of_tokens(tokens: int, phases: Sequence[Phase], *, from_the_end: bool = False) -> int:
    """Return how many steps at the start or the end of a run have so many tokens, rounded up.

    Of a run that is too short, as many as it would take if it went on like its last phase (or its first one).
    """
    steps, each = 0, 1
    for phase in reversed(phases) if from_the_end else phases:
        each, span = phase.training.batch_size * phase.data.seq_len, phase.last_step - phase.first_step
        if tokens <= span * each:
            break
        steps, tokens = steps + span, tokens - span * each
    return steps + -(-tokens // each)


def _lengths(training: TrainingSpec, steps_with: Callable[[int], int]) -> list[int]:
    """Return the lengths of the run in steps, of which the shortest holds."""
    lengths = [] if training.max_steps is None else [training.max_steps]
    return lengths if training.max_tokens is None else [*lengths, steps_with(training.max_tokens)]


def _steps_with(tokens: int, phases: Sequence[PhaseSpec], tokens_a_step: Sequence[int]) -> int:
    """Return a number of steps that make a run of ``tokens``, where one step less makes a shorter one."""
    # By halving, because phases that end at a share of the run move with its length.
    short, enough = 0, -(-tokens // min(tokens_a_step))
    while enough - short > 1:
        middle = (short + enough) // 2
        seen = sum(
            (end - start) * each
            for (start, end), each in zip(_spans(phases, tokens_a_step, middle), tokens_a_step, strict=True)
        )
        short, enough = (short, middle) if seen >= tokens else (middle, enough)
    return enough


def _spans(
    phases: Sequence[PhaseSpec], tokens_a_step: Sequence[int], total_steps: int
) -> Iterator[tuple[int, int]]:
    """Yield the steps [start, end) of each phase, cut to a run of so many steps."""
    start, tokens = 0, 0
    for index, each in enumerate(tokens_a_step):
        end = _end(phases, index, start=start, tokens=tokens, each=each, total_steps=total_steps)
        end = min(max(end, start), total_steps) if index + 1 < len(phases) else total_steps
        yield start, end
        start, tokens = end, tokens + (end - start) * each


def _end(
    phases: Sequence[PhaseSpec], index: int, *, start: int, tokens: int, each: int, total_steps: int
) -> int:
    """Return where a phase ends as its spec says, whether the run is long enough or not.

    It begins at step ``start``, with ``tokens`` seen before, and sees ``each`` a step. Shares are rounded so
    that every phase has a step.
    """
    until, left = phases[index].until, len(phases) - index - 1
    if until is None:
        return total_steps
    if isinstance(until, str):
        return start + max(0, -(-(tokens_of(until) - tokens) // each))
    end = steps_of(until, total_steps)
    return min(max(end, start + 1), total_steps - left) if isinstance(until, float) and left else end


def _ends(phases: Sequence[PhaseSpec], tokens_a_step: Sequence[int], total_steps: int) -> list[int]:
    """Find the step before which each phase ends, and refuse those that don't cover the run."""
    if len(phases) > total_steps:
        message = (
            f"{len(phases)} phases don't fit into a run of length {total_steps}; "
            f"give it {len(phases)} steps or more, or leave phases out"
        )
        raise field_error(message, "phases", value=phases)
    ends: list[int] = []
    start = tokens = 0
    for index, (phase, each) in enumerate(zip(phases, tokens_a_step, strict=True)):
        end = _end(phases, index, start=start, tokens=tokens, each=each, total_steps=total_steps)
        if complaint := _misplaced(phases, index, start=start, end=end, total_steps=total_steps):
            raise field_error(complaint, "phases", index, "until", value=phase.until)
        ends.append(end)
        start, tokens = end, tokens + (end - start) * each
    return ends


def _misplaced(
    phases: Sequence[PhaseSpec], index: int, *, start: int, end: int, total_steps: int
) -> str | None:
    """Say what is wrong with where a phase ends, if anything is."""
    phase, last = phases[index], index == len(phases) - 1
    place = f"{end} ({phase.until})" if isinstance(phase.until, str) else str(end)
    if not last and phase.until is None:
        return "only the last phase may leave out where it ends; give a step, a share or tokens"
    if not last and end >= total_steps:
        return (
            f"phase {phase.name!r} ends at step {place} of {total_steps}, so the next one never begins; "
            "end it earlier, give a share such as 0.5, or lengthen the run"
        )
    if last and end != total_steps:
        return f"the last phase ends at step {place} of {total_steps}; leave out where it ends"
    if index and _goes_back(phase.until, phases[index - 1].until, start, total_steps):
        return (
            f"phase {phase.name!r} ends at {phase.until}, and the one before it at "
            f"{phases[index - 1].until}; each ends later than the one before"
        )
    if end <= start:
        return f"phase {phase.name!r} begins at step {start} and ends at {place}; end it later"
    return None


def _goes_back(until: Until | None, before: Until | None, start: int, total_steps: int) -> bool:
    """Whether a share is of less than the phase before it, which giving each phase a step would hide."""
    if not isinstance(until, float):
        return False
    return until <= before if isinstance(before, float) else steps_of(until, total_steps) < start


def _changed_training(training: TrainingSpec, phase: PhaseSpec) -> TrainingSpec:
    optimizer = phase.training.get("optimizer", {})
    if isinstance(optimizer, Mapping):
        _refuse_others(optimizer, {"learning_rate"}, "training", "optimizer", what="the optimizer")
    return _changed("training", training, phase.training, _CHANGEABLE)


def _changed(section: str, spec: _Section, changes: Mapping[str, Any], allowed: Collection[str]) -> _Section:
    """Return a section of the run as a phase has it."""
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
            message = f"a phase can't change {key!r} of {what}; {did_you_mean(key, allowed)}"
            raise field_error(message, *where, key, value=value, of_key=True)
