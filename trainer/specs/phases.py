"""Phases of a run: how the search and its gradient change on the way, the weights staying as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from implicit_blocks.specs import ModelSpec, Spec, merge, refusal, together
from implicit_blocks.suggestions import did_you_mean
from trainer.schedule import steps_of
from trainer.specs.spans import Span
from trainer.specs.training import TrainingSpec


class PhaseSpec(Spec):
    """One phase: what differs from the run's own `model` and `training` sections."""

    name: str
    """What records call it."""
    until: Span | None = None
    """Where it ends: a step, or a share of the run. Null: the end of the run, so only in the last phase."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Changes to the model's solver, gradient, stopping and at_evaluation."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Changes to clip_norm, checkpoint_activations and optimizer.learning_rate."""


class Phase(NamedTuple):
    """A phase worked out: steps [first_step, last_step), and the specs that hold there."""

    name: str
    first_step: int
    last_step: int
    model: ModelSpec
    training: TrainingSpec


def plan(
    phases: Sequence[PhaseSpec], *, model: ModelSpec, training: TrainingSpec, total_steps: int
) -> list[Phase]:
    """Work out the phases of a run; without any, one named ``train``.

    Raises:
        ValidationError: phases that overlap, end early or change what they can't; located from the run spec.

    """
    if not phases:
        return [Phase("train", 0, total_steps, model, training)]
    planned, start = [], 0
    for index, (phase, end) in enumerate(zip(phases, _ends(phases, total_steps), strict=True)):
        try:
            planned.append(
                Phase(
                    phase.name, start, end, _changed_model(model, phase), _changed_training(training, phase)
                )
            )
        except ValidationError as error:
            raise together([error], under=("phases", index)) from None
        start = end
    return planned


def _ends(phases: Sequence[PhaseSpec], total_steps: int) -> list[int]:
    """Find the step before which each phase ends; shares are rounded so that every phase has a step."""
    if len(phases) > total_steps:
        message = (
            f"{len(phases)} phases don't fit into a run of length {total_steps}; "
            f"give it {len(phases)} steps or more, or leave phases out"
        )
        raise refusal(message, "phases", value=phases)
    ends: list[int] = []
    for index, phase in enumerate(phases):
        start, left = (ends[-1] if ends else 0), len(phases) - index - 1
        end = total_steps if phase.until is None else steps_of(phase.until, total_steps)
        if isinstance(phase.until, float) and left:
            end = min(max(end, start + 1), total_steps - left)
        where = ("phases", index, "until")
        if left and phase.until is None:
            raise refusal(
                "only the last phase may leave out where it ends; give a step or a share", *where, value=None
            )
        if left and end >= total_steps:
            message = (
                f"phase {phase.name!r} ends at step {end} of {total_steps}, so the next one never begins; "
                "end it earlier, give a share such as 0.5, or lengthen the run"
            )
            raise refusal(message, *where, value=phase.until)
        if not left and end != total_steps:
            message = f"the last phase ends at step {end} of {total_steps}; leave out where it ends"
            raise refusal(message, *where, value=phase.until)
        if end <= start:
            message = f"phase {phase.name!r} begins at step {start} and ends at {end}; end it later"
            raise refusal(message, *where, value=phase.until)
        ends.append(end)
    return ends


def _changed_model(model: ModelSpec, phase: PhaseSpec) -> ModelSpec:
    _refuse_others(phase.model, model.changeable, "model", what=f"of a model of kind {model.kind!r}")
    try:
        changed: ModelSpec = type(model).model_validate(merge(model.model_dump(), phase.model))
    except ValidationError as error:
        raise together([error], under=("model",)) from None
    return changed


def _changed_training(training: TrainingSpec, phase: PhaseSpec) -> TrainingSpec:
    _refuse_others(
        phase.training, {"clip_norm", "checkpoint_activations", "optimizer"}, "training", what="of training"
    )
    optimizer = phase.training.get("optimizer", {})
    if isinstance(optimizer, Mapping):
        _refuse_others(optimizer, {"learning_rate"}, "training", "optimizer", what="of the optimizer")
    try:
        return TrainingSpec.model_validate(merge(training.model_dump(), phase.training))
    except ValidationError as error:
        raise together([error], under=("training",)) from None


def _refuse_others(
    changes: Mapping[str, Any], allowed: frozenset[str] | set[str], *where: str, what: str
) -> None:
    for key, value in changes.items():
        if key not in allowed:
            message = f"a phase can't change {key!r} {what}; {did_you_mean(key, allowed)}"
            raise refusal(message, *where, key, value=value, of_key=True)
