"""What several experiments are asked, in the same words and with the same meaning."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from implicit_blocks._utils.validation import require_count


def add_device(made: argparse.ArgumentParser) -> None:
    """Add the device."""
    made.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda where there is one)")


def add_changes(made: argparse.ArgumentParser) -> None:
    """Add changes to the specs of runs."""
    made.add_argument(
        "--set",
        nargs="+",
        # Given twice, it adds: nobody should lose the first half of a command.
        action="extend",
        default=[],
        metavar="path.to.key=value",
        help="changes to all specs; what explicit models don't know they leave out",
    )


def refuse_taken(changes: Iterable[str], taken: Mapping[str, str]) -> None:
    """Refuse changes of what an option of the experiment says: one of the two would be lost in silence.

    Args:
        changes: ``path.to.key=value``.
        taken: paths, and the options that say them.

    Raises:
        ValueError: names the change and the option.

    """
    for change in changes:
        key = change.partition("=")[0].strip()
        if key in taken:
            raise ValueError(f"--set {change} is said by {taken[key]} here; give it there")


def require_once(name: str, values: Sequence[Any]) -> None:
    """Refuse a value that is given again in its list: it would be counted twice.

    Raises:
        ValueError: names the list and the value.

    """
    for value in values:
        if (times := values.count(value)) > 1:
            raise ValueError(f"{name} has {value} {times} times; give each value once")


def require_counts(**values: int | None) -> None:
    """Refuse numbers below 1; None says nothing.

    Raises:
        ValueError: names the number.

    """
    for name, value in values.items():
        if value is not None:
            require_count(name, value)


def require_tolerances(tolerances: Iterable[float]) -> None:
    """Refuse what can be no tolerance.

    Raises:
        ValueError: names it.

    """
    for tolerance in tolerances:
        if not (math.isfinite(tolerance) and tolerance > 0):
            raise ValueError(f"tolerance {tolerance} is none; choose numbers above 0, such as 0.05 and 1e-3")


def add_run_options(made: argparse.ArgumentParser) -> None:
    """Add seeds, the device, changes to the specs, and whether to train at all."""
    made.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="a run each (0)")
    made.add_argument(
        "--only-finished",
        action="store_true",
        help="train nothing: put together what other calls with this --output have trained",
    )
    add_device(made)
    add_changes(made)
