"""Reading a published ``config.json`` field by field, with one error for all fields that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from implicit_blocks.hf.config_fields import NEUTRAL, refuse_unread

ANY_MODEL = NEUTRAL | {"auto_map", "is_encoder_decoder", "keys_to_ignore_at_inference"}
"""Fields of any transformers configuration; the last three name classes and options of calls."""

MOST_LAYERS = 4096


class PublishedFields:
    """The fields of a configuration, of which each is read, or ignored for a reason, or reported.

    Every method that reads records a complaint for a value that does not fit, and returns the default, so
    that ``check`` reports all complaints together.

    Args:
        config: the published configuration.
        name: the architecture, for the error.

    """

    def __init__(self, config: Mapping[str, Any], *, name: str) -> None:
        self.config, self.name = config, name
        self.complaints: list[str] = []
        self._known: set[str] = set()

    def complain(self, field: str, message: str) -> None:
        """Record that the value of a field does not fit."""
        self.complaints.append(f"{field} is {self.config.get(field)!r}: {message}")

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """Accept these fields with any value; the mapping gives the reason of each."""
        self._known |= reasons.keys()

    def take(self, field: str, default: Any = None) -> Any:
        """Return a value of any type; the default if the field is missing."""
        self._known.add(field)
        return self.config.get(field, default)

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number of at least ``minimum``; without a default the field is required."""
        value = self._or_default(field, default)
        if type(value) is int and value >= minimum:
            return value
        self._wrong(field, f"expected a whole number of at least {minimum}")
        return minimum if default is None else default

    def layers(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a number of layers, each of which gets its own names."""
        count = self.integer(field, default, minimum=minimum)
        if count <= MOST_LAYERS:
            return count
        self.complain(field, f"expected at most {MOST_LAYERS}")
        return MOST_LAYERS

    def number(self, field: str, default: float | None = None, *, or_zero: bool = False) -> float:
        """Return a finite positive number; without a default the field is required.

        Args:
            field: the name.
            default: the value of a missing field.
            or_zero: also accept 0.

        """
        value = self._or_default(field, default)
        if type(value) in (int, float) and (0 < value < float("inf") or (or_zero and value == 0)):
            return float(value)
        self._wrong(field, "expected a number of at least 0" if or_zero else "expected a positive number")
        return 1.0 if default is None else default

    def optional_number(self, field: str, default: float | None = None) -> float | None:
        """Return a positive number, or None if the field is null."""
        if self.take(field, default) is None:
            return None
        return self.number(field, default)

    def flag(self, field: str, default: bool) -> bool:
        """Return true or false; null is the default."""
        value = self._or_default(field, default)
        if isinstance(value, bool):
            return value
        self._wrong(field, "expected true or false")
        return default

    def choice(self, field: str, default: str, *supported: str) -> str:
        """Return one of the supported values, of which ``default`` is the value of a missing field."""
        value = self._or_default(field, default)
        if isinstance(value, str) and value in supported:
            return value
        self._wrong(field, f"supported are {', '.join(map(repr, supported))}")
        return supported[0]

    def require(self, field: str, *supported: Any, reason: str) -> None:
        """Accept only these values, or a missing field; the reason says why others are not supported."""
        value = self.take(field, supported[0])
        if not any(type(value) is type(other) and value == other for other in supported):
            self.complain(field, reason)

    def check(self) -> None:
        """Raise one error that lists all complaints and all unknown fields.

        Unknown fields that are null are switched off, and accepted.

        Raises:
            ValueError: there are complaints or unknown fields.

        """
        failure = f"this configuration of {self.name} cannot be read"
        refuse_unread(failure, self.config, self._known | ANY_MODEL, self.complaints)

    def _or_default(self, field: str, default: Any) -> Any:
        value = self.take(field)
        return default if value is None else value

    def _wrong(self, field: str, message: str) -> None:
        if self.config.get(field) is None:
            self.complaints.append(f"{field} is missing: {message}")
        else:
            self.complain(field, message)
