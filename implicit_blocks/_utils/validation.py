"""Checks of options that several components share."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def require_count(name: str, value: int) -> None:
    """Raise for anything but an integer of at least 1.

    Raises:
        ValueError: names the number and its value.

    """
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; choose an integer of at least 1")
    if value < 1:
        raise ValueError(f"{name} is {value}; choose at least 1")


def require_share(name: str, value: float) -> None:
    """Raise for a number outside (0, 1], such as a damping.

    Raises:
        ValueError: names the number and its value.

    """
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; choose a number in (0, 1]")


def require_part(name: str, part: Any, base: type, *, such_as: str) -> None:
    """Raise for a part of the wrong type, such as its name or its spec; None stands for the default.

    Raises:
        ValueError: names the part, the value received, and an example.

    """
    if part is not None and not isinstance(part, base):
        raise ValueError(f"{name} is {part!r}; give a {base.__name__} such as {such_as}")
