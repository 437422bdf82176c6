"""Delivery of a worker's events: a thread sends what has accumulated, at intervals."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from implicit_blocks.serving.jobs import Batch

DELIVERY_SECONDS = 0.01
"""The least time between two deliveries, unless a text has ended, whose client may send the next one."""

Send = Callable[[Batch], None]


class Outbox:
    """Takes events from a worker's thread, and sends them from a thread of its own.

    The decoder thus waits neither for the next delivery nor for the receiver.

    Args:
        send: receives each batch; it may block. After an ``OSError`` nothing more is sent.

    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._batches: deque[Batch] = deque()
        self._any, self._urgent = threading.Event(), threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def put(self, batch: Batch, *, urgent: bool = False) -> None:
        """Send a batch with the next delivery, which is at once if it is urgent."""
        self._batches.append(batch)
        self._any.set()
        if urgent:
            self._urgent.set()

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._closed = True
        self._urgent.set()
        self._any.set()
        self._thread.join()

    def _run(self) -> None:
        sent = -math.inf
        while True:
            self._any.wait()
            left = sent + DELIVERY_SECONDS - time.monotonic()
            if left > 0:
                self._urgent.wait(left)
            closed = self._closed
            self._any.clear()
            self._urgent.clear()
            batch = Batch()
            while self._batches:
                batch.append(self._batches.popleft())
            sent = time.monotonic()
            try:
                self._send(batch)
            except OSError:  # the HTTP process has ended, which its parent reports
                return
            if closed:
                return
