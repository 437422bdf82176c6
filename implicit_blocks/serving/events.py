"""Server-sent events, as bytes."""

from __future__ import annotations

from typing import Any

from fastapi.sse import format_sse_event
from pydantic_core import to_json

END = format_sse_event(data_str="[DONE]")
"""The event that ends a stream."""


def event(value: dict[str, Any]) -> bytes:
    """Return an object as an event; numbers that are not finite become null."""
    return format_sse_event(data_str=to_json(value, inf_nan_mode="null").decode())
