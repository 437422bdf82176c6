"""Validation of experiment options, before any work is done."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.specs.base import require_count


def reject_option_conflicts(changes: Iterable[str], options: Mapping[str, str]) -> None:
    """Reject spec changes that an option of the experiment also sets.

    Args:
        changes: ``path.to.key=value``.
        options: paths in the spec, and the options that set them.

    Raises:
        ValueError: names the change and the option.

    """
    for change in changes:
        key = change.partition("=")[0].strip()
        if key in options:
            raise ValueError(f"--set {change} conflicts with {options[key]}; use {options[key]} instead")


def require_once(name: str, values: Sequence[Any]) -> None:
    """Reject a list with a repeated value, which would be counted twice.

    Raises:
        ValueError: names the list and the value.

    """
    for value in values:
        if (times := values.count(value)) > 1:
            raise ValueError(f"{name} contains {value} {times} times; give each value once")


def require_counts(**values: int | None) -> None:
    """Reject numbers below 1; None is allowed.

    Raises:
        ValueError: names the number.

    """
    for name, value in values.items():
        if value is not None:
            require_count(name, value)


def require_tolerances(tolerances: Iterable[float]) -> None:
    """Reject tolerances that are not finite and positive.

    Raises:
        ValueError: names the tolerance.

    """
    for tolerance in tolerances:
        if not (math.isfinite(tolerance) and tolerance > 0):
            raise ValueError(f"tolerance must be positive and finite, got {tolerance}")


def require_matplotlib() -> None:
    """Reject an experiment whose plot could not be drawn at the end.

    Raises:
        ValueError: matplotlib is missing.

    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"the plot needs matplotlib; {install_extra('train')}")


def require_writable(folder: Path) -> None:
    """Reject an output directory that cannot be written, before hours of work; nothing is created.

    Raises:
        ValueError: the path is a file, or its directory cannot be created.

    """
    place = next(one for one in (folder, *folder.parents) if one.exists())
    if not place.is_dir():
        what = "is a file, not a directory" if place == folder else f"is inside {place}, which is a file"
        raise ValueError(f"the output {folder} {what}; choose another --output")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(
            f"the output {folder} cannot be written: no permission in {place}; choose another --output"
        )
