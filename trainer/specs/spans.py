"""Durations within a run: a number of steps, a share of the run, or a number of tokens."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import PlainValidator

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
