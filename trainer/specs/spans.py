"""Lengths of time within a run: a number of steps, or a share of the run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator


def _span(value: Any) -> int | float:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    raise ValueError(
        "give a number of steps (an integer, 0 or more) or a share of the run (a float from 0.0 to 1.0)"
    )


Span = Annotated[int | float, PlainValidator(_span, json_schema_input_type=int | float)]
"""An integer counts steps, a float from 0.0 to 1.0 a share of the run: 1 is one step, 1.0 the whole run."""
