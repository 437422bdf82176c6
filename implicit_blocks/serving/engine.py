"""The engine of a server: texts of all requests share the slots of one decoder.

The event loop submits and cancels texts; a thread decodes (``worker``) and sends their events back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.serving.baseline import TransformersDecoder
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import Event, Job
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.worker import Cancel, Decoder, Submit, Worker

_USUAL_SECONDS = 1.0
"""The assumed duration of a text before the first one has ended."""

DELIVERY_SECONDS = (0.01, 0.1)
"""The least time between two deliveries of events: with few texts, and with many.

Each delivery wakes the event loop, which competes with the decoder's thread for the interpreter, and each
text writes all tokens that it received as one chunk. A text's tokens are thus up to this much later.
"""

CHUNKS_PER_SECOND = 1500
"""How many chunks all texts together write, about, between these two times: 43 ms with 64 texts."""


class Engine:
    """Runs texts on a model until it is closed.

    Args:
        model: an ``ImplicitLM`` or ``ExplicitLM``, or a model of transformers, in evaluation mode.
        options: slots, limits, and the seconds after which the decoder counts as stuck.
        metrics: what is counted.
        make_decoder: creates the decoder, also after a failure; None: a ``ContinuousDecoder`` of the model,
            or a ``TransformersDecoder``.

    Raises:
        ValueError: as for ``ContinuousDecoder``.

    """

    def __init__(
        self,
        model: Any,
        options: ServerOptions,
        metrics: Metrics,
        *,
        make_decoder: Callable[[], Decoder] | None = None,
    ) -> None:
        self.model, self.options, self.metrics = model, options, metrics
        self.worker = Worker(model, metrics, make_decoder or self._decoder, self._send)
        self.accepts_limits = self.decoder.accepts_limits
        self.pending = 0
        """The number of texts that were accepted and have not ended; of the event loop."""
        self._seconds = _USUAL_SECONDS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._outbox: deque[tuple[Sequence[tuple[Job, Event]], Sequence[float]]] = deque()
        self._scheduled = False
        """Whether the event loop will take what is in the outbox."""
        self._delivered = -math.inf
        """When the event loop last did so."""
        self.closing = False

    @property
    def decoder(self) -> Decoder:
        """The decoder, a new one after a failure."""
        return self.worker.decoder

    def _decoder(self) -> Decoder:
        if not isinstance(self.model, LanguageModel):
            return TransformersDecoder(self.model, max_batch_size=self.options.max_batch_size)
        return ContinuousDecoder(
            self.model,
            max_batch_size=self.options.max_batch_size,
            max_seq_len=self.options.max_seq_len,
            limits_per_request=self.options.limits_per_request,
        )

    def start(self) -> None:
        """Start the thread; its events arrive in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.worker.run, name="decoder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step; texts that have not ended fail."""
        self.closing = True
        self.worker.inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=self.options.shutdown_seconds)

    @property
    def trouble(self) -> str | None:
        """Why no request can be served now, None if it can."""
        if self.worker.broken is not None:
            return self.worker.broken
        if self.closing:
            return "the server is shutting down"
        still = time.monotonic() - self.worker.beat
        if self.pending and still > self.options.stall_seconds:
            return f"the decoder has made no progress for {still:.0f} seconds"
        return None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the texts of a request, all or none.

        Raises:
            ApiError: 429 if the queue is full, 503 if the decoder is stuck or closed, 400 for more texts than
                the queue can ever take.

        """
        if (trouble := self.trouble) is not None:
            raise ApiError(503, f"{trouble}; try again later", code="unavailable", retry_after=5)
        room = self.options.max_batch_size + self.options.max_queue
        if len(jobs) > room:
            raise ApiError(
                400,
                f"the request asks for {len(jobs)} texts, and the server takes at most {room}; send fewer "
                "prompts, or a smaller n",
                param="n",
            )
        if self.pending + len(jobs) > room:
            self.metrics.refused.inc()
            waited = self._seconds * (self.pending + len(jobs) - room) / self.options.max_batch_size
            raise ApiError(
                429,
                f"the queue is full: {self.pending} texts are running or waiting; try again after the "
                "seconds in Retry-After",
                code="queue_full",
                retry_after=min(60, max(1, math.ceil(waited))),
            )
        if not self.pending:
            self.worker.beat = time.monotonic()
        now = time.monotonic()
        for job in jobs:
            job.submitted = now
        self.pending += len(jobs)
        self.metrics.waiting.inc(len(jobs))
        self.worker.inbox.put(Submit(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End cancelled texts."""
        if any(not job.finished for job in jobs):
            self.worker.inbox.put(Cancel(jobs))

    def _send(self, events: Sequence[tuple[Job, Event]], ended: Sequence[float]) -> None:
        """Send events, and the seconds that ended texts took, from the thread to the event loop."""
        assert self._loop is not None
        self._outbox.append((events, ended))
        if self._scheduled:
            return
        self._scheduled = True
        with contextlib.suppress(RuntimeError):  # the loop was closed without waiting for the thread
            self._loop.call_soon_threadsafe(self._schedule)

    @property
    def delivery_seconds(self) -> float:
        """The time between two deliveries, which grows with the number of texts that are decoded."""
        shortest, longest = DELIVERY_SECONDS
        texts = min(self.pending, self.options.max_batch_size)
        return min(longest, max(shortest, texts / CHUNKS_PER_SECOND))

    def _schedule(self) -> None:
        """Deliver events now, or once the time since the last delivery is over."""
        assert self._loop is not None
        left = self._delivered + self.delivery_seconds - time.monotonic()
        if left > 0:
            self._loop.call_later(left, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        """Put the events of each request into its queue."""
        self._scheduled = False  # before the outbox is read, so that the thread leaves nothing in it
        self._delivered = time.monotonic()
        requests: dict[asyncio.Queue[list[tuple[Job, Event]]], list[tuple[Job, Event]]] = {}
        while self._outbox:
            events, ended = self._outbox.popleft()
            for job, event in events:
                requests.setdefault(job.events, []).append((job, event))
            for seconds in ended:
                self.pending -= 1
                self._seconds += 0.1 * (seconds - self._seconds)
        for waiting, arrived in requests.items():
            waiting.put_nowait(arrived)
