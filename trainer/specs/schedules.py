"""Durations within a run, and the `training.schedule` section: the learning rate as a function of the step.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PlainValidator

from implicit_blocks.specs import ComponentSpec

# ------------------------------------------------------------------------------------ durations

_STEPS_OR_SHARE = "a number of steps (an integer, 0 or more)", "a share of the run (a float from 0.0 to 1.0)"
_TOKENS = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?) ?tokens?")
_MOST_TOKENS = 10**18


def _span(value: Any) -> int | float:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    raise ValueError(f"give {' or '.join(_STEPS_OR_SHARE)}")


def _span_or_tokens(value: Any) -> int | float | str:
    if isinstance(value, str) and (found := _TOKENS.fullmatch(value.strip())):
        tokens = Decimal(found[1])
        if 1 <= tokens <= _MOST_TOKENS and tokens == int(tokens):
            return f"{int(tokens)} tokens"
    else:
        try:
            return _span(value)
        except ValueError:
            pass
    raise ValueError(
        f"give {', '.join(_STEPS_OR_SHARE)} or a whole number of tokens with its unit (2e9 tokens)"
    )


def tokens_of(span: str) -> int:
    """Return the number of tokens in a validated :data:`Span` that counts them."""
    return int(span.removesuffix(" tokens"))


def steps_of(amount: float | int | str, total_steps: int) -> int:
    """Return ``amount`` in steps: a float up to 1.0 is a fraction of the run, any other number is in steps.

    A fraction is rounded to the nearest step. Amounts in tokens must be converted first
    (`ScheduleSpec.in_steps`).
    """
    assert not isinstance(amount, str)
    if isinstance(amount, float) and amount <= 1.0:
        return round(amount * total_steps)
    return int(amount)


Span = Annotated[int | float | str, PlainValidator(_span_or_tokens, json_schema_input_type=int | float | str)]
"""An integer counts steps, a float from 0.0 to 1.0 is a share of the run (1 is one step, 1.0 the whole run),
and text such as ``2e9 tokens`` counts tokens, rounded up to whole steps."""

Until = Span
"""A span counted from the start of the run."""

# ------------------------------------------------------------------------------------ schedules

FinalFraction = Annotated[float, Field(ge=0, le=1)]


class ScheduleSpec(ComponentSpec):
    """Base class of all schedule specs: the learning rate as a function of the step."""

    family: ClassVar[str] = "schedule"
    builds: ClassVar[str | None] = "trainer.optim.schedules:Schedule"
    from_the_end: ClassVar[frozenset[str]] = frozenset()
    """Fields that are spans at the end of the run; all others are spans at its start. The distinction matters
    for spans in tokens when the batch changes: builders receive steps or shares."""

    def in_steps(self, steps: Callable[..., int]) -> Self:
        """Return a copy with spans in tokens converted to steps by ``steps(tokens, from_the_end=…)``."""
        spans = {name: getattr(self, name) for name in type(self).model_fields}
        counted = {
            name: steps(tokens_of(span), from_the_end=name in self.from_the_end)
            for name, span in spans.items()
            if isinstance(span, str) and span.endswith(" tokens")
        }
        return self.model_copy(update=counted)

    def check(self, total_steps: int) -> None:
        """Reject a run that is too short.

        Raises:
            ValueError: explains which span does not fit.

        """
        return None


class _SpannedSpec(ScheduleSpec):
    """A schedule with a span `warmup` at the start of the run, and perhaps a `decay` at its end."""

    def check(self, total_steps: int) -> None:
        """Reject a run that is shorter than the schedule's `warmup` and `decay`.

        Raises:
            ValueError: the spans do not fit into the run.

        """
        spans = [
            (name, steps_of(getattr(self, name), total_steps))
            for name in ("warmup", "decay")
            if name in type(self).model_fields
        ]
        if sum(steps for _, steps in spans) > total_steps:
            (name, steps), *others = spans
            listed = " and ".join([f"a {name} of {steps} steps", *(f"a {name} of {n}" for name, n in others)])
            verb, them = ("don't", "them") if others else ("doesn't", "it")
            raise ValueError(
                f"{listed} {verb} fit into {total_steps} steps; shorten {them}, or use shares of the run "
                "such as 0.1"
            )


class WarmupConstantSqrtSpec(_SpannedSpec):
    """Linear warmup, constant rate, then a ``1 - sqrt`` decay."""

    from_the_end: ClassVar[frozenset[str]] = frozenset({"decay"})

    kind: Literal["warmup_constant_sqrt"] = "warmup_constant_sqrt"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    decay: Span = 0.2
    """Length of the decay at the end of the run: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 1e-5
    """Learning rate of the last step."""


class WarmupLinearSpec(_SpannedSpec):
    """Linear warmup, then linear decay."""

    kind: Literal["warmup_linear"] = "warmup_linear"
    warmup: Span = 0.1
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_learning_rate: NonNegativeFloat = 0.0
    """Learning rate one step after the last, so that no step has a learning rate of 0."""


class CosineSpec(_SpannedSpec):
    """Linear warmup, then half a cosine from the peak to a fraction of it."""

    kind: Literal["cosine"] = "cosine"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_fraction: FinalFraction = 0.1
    """Learning rate one step after the last, as a fraction of the peak."""


class LinearSpec(_SpannedSpec):
    """Linear warmup, then a linear decay from the peak to a fraction of it."""

    kind: Literal["linear"] = "linear"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    final_fraction: FinalFraction = 0.0
    """Learning rate one step after the last, as a fraction of the peak."""


class WSDSpec(_SpannedSpec):
    """Linear warmup, stable rate, decay at the end (WSD; Hu et al., 2024; Hägele et al., 2024)."""

    from_the_end: ClassVar[frozenset[str]] = frozenset({"decay"})

    kind: Literal["wsd"] = "wsd"
    warmup: Span = 0.01
    """Length of the warmup: steps, a share of the run, or tokens."""
    decay: Span = 0.2
    """Length of the decay at the end of the run: steps, a share of the run, or tokens."""
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """Shape of the decay: linear, or one minus the square root of the progress."""
    final_fraction: FinalFraction = 0.0
    """Learning rate one step after the last, as a fraction of the peak."""


class ConstantSpec(_SpannedSpec):
    """Linear warmup, then the peak rate to the end of the run."""

    kind: Literal["constant"] = "constant"
    warmup: Span = 0.0
    """Length of the warmup: steps, a share of the run, or tokens."""
