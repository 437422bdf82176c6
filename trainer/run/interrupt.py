"""Signals that stop a run after the current step, so that it can be saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Ctrl-C, and the signals that schedulers send before they end a job."""

REPEAT_SECONDS = 1.0
"""Signals within this time are one request, since a terminal and a launcher may both forward a Ctrl-C."""


def hang_ups() -> list[int]:
    """Return SIGHUP, unless this process ignores it, as under ``nohup``, or the platform has none."""
    found = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
    return [number for number in found if signal.getsignal(number) != signal.SIG_IGN]


class Interrupt:
    """A context in which one of the signals is stored in ``received`` and the program continues.

    A second SIGINT, more than :data:`REPEAT_SECONDS` after the first signal, raises KeyboardInterrupt; other
    repeated signals have no effect. Outside the main thread, in which alone Python handles signals, the
    context does nothing.
    """

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self._signals = signals
        self.received: int | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
        elif number == signal.SIGINT and now - self._since > REPEAT_SECONDS:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
