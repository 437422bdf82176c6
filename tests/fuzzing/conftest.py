"""Helpers of the fuzzers: a time limit per case, and a test for errors raised by this project."""

from __future__ import annotations

import contextlib
import linecache
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = (ROOT / "implicit_blocks", ROOT / "trainer", ROOT / "plugins")
SECONDS = 60.0
"""Time limit of a case; most take a tenth of a second, more where packages are imported."""


class TooLongError(BaseException):
    """A case took longer than `SECONDS`."""


@contextlib.contextmanager
def _time_limit(seconds: float = SECONDS) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def time_limit() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that raises `TooLongError` after `SECONDS`."""
    return _time_limit


def _is_ours(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of this project raised the error."""
    if isinstance(error, OSError):  # the operating system's errors name the file
        return True
    if not isinstance(error, ValueError):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return line.startswith("raise ") and any(Path(last.filename).is_relative_to(folder) for folder in OURS)


@pytest.fixture
def is_ours() -> Callable[[BaseException], bool]:
    """Return the function that recognizes errors raised by this project."""
    return _is_ours
