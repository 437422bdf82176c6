"""Checks that several components make of their numbers, each said in the same words."""

from __future__ import annotations

from numbers import Integral


def require_count(name: str, value: int) -> None:
    """Refuse what is no whole number, or below 1.

    Raises:
        ValueError: names the number and its value.

    """
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; choose a whole number, at least 1")
    if value < 1:
        raise ValueError(f"{name} is {value}; choose at least 1")


def require_share(name: str, value: float) -> None:
    """Refuse a number outside (0, 1], such as a damping.

    Raises:
        ValueError: names the number and its value.

    """
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; choose a number in (0, 1]")
