"""A polite end: a signal lets the step finish and the run be saved."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What ends a run politely: Ctrl-C, and what schedulers send before they take a machine away."""

REPEAT_SECONDS = 1.0
"""A terminal and a launcher may both pass on one Ctrl-C: what comes so soon is the same request."""


class Interrupt:
    """Within this context a signal of :data:`SIGNALS` is noted in ``received``, and the program goes on.

    A second SIGINT, later than :data:`REPEAT_SECONDS` after the first signal, raises KeyboardInterrupt: the
    user means it. The others may come as often as they like; who wants the process gone at once has SIGKILL.
    Outside the main thread, where Python takes no signals, it does nothing.
    """

    def __init__(self) -> None:
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
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
