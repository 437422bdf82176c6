"""The engine of a server: texts of all requests share the worker of one model.

It runs in the event loop: it admits texts or refuses them, sends them to the worker, and gives each request
the events of its texts.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import (
    Batch,
    Cancel,
    Ended,
    Event,
    Failed,
    InspectionOrder,
    Job,
    Report,
    Submit,
)
from implicit_blocks.serving.links import Link
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.options import ServerOptions

_USUAL_SECONDS = 1.0
"""The assumed duration of a text before the first one has ended."""

CHUNKS_PER_SECOND = 1500
"""About how many chunks all texts together write: each costs as much processor time as several tokens.

With N texts each receives its tokens every N / 1500 s, in one chunk.
"""
LONGEST_SECONDS = 0.1
"""The longest time that a token is withheld for that."""

Reports = asyncio.Queue[Report | ApiError | None]


class Engine:
    """Runs texts on a worker until it is closed.

    Args:
        link: the way to the worker.
        options: slots, limits, and the seconds after which the decoder counts as stuck.
        metrics: what is counted.

    """

    def __init__(self, link: Link, options: ServerOptions, metrics: Metrics) -> None:
        self.link, self.options, self.metrics = link, options, metrics
        self.on_lost: Callable[[], None] | None = None
        """Called when the worker's process has ended."""
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        """The texts that were accepted and have not ended, by number."""
        self._inspections: dict[int, Reports] = {}
        self._seconds = _USUAL_SECONDS
        self._beat = time.monotonic()
        self._broken: str | None = None
        self._closing = False
        self._undelivered: dict[int, Job] = {}
        """The texts with events that are withheld until the next delivery."""
        self._delivered = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """The number of texts that were accepted and have not ended."""
        return len(self._jobs)

    @property
    def inspections(self) -> int:
        """The number of inspections that run."""
        return len(self._inspections)

    async def start(self) -> None:
        """Begin to receive events, in the running event loop."""
        await self.link.start(self._receive, self._lost)

    async def close(self) -> None:
        """End the worker after its current step; texts that have not ended fail."""
        self._closing = True
        await self.link.stop(self.options.shutdown_seconds)

    @property
    def trouble(self) -> str | None:
        """Why no request can be served now, None if it can."""
        if self._broken is not None:
            return self._broken
        if self._closing:
            return "the server is shutting down"
        still = time.monotonic() - self._beat
        if self._jobs and still > self.options.stall_seconds:
            return f"the decoder has made no progress for {still:.0f} seconds"
        return None

    # -------------------------------------------------------------------------------- to the worker

    def number(self) -> int:
        """Return the number of a new order."""
        return next(self._numbers)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the texts of a request, all or none.

        Raises:
            ApiError: 429 if the queue is full, 503 if the decoder is stuck or closed, 400 for more texts than
                the queue can ever take.

        """
        self._check()
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
        now = time.monotonic()
        if not self._jobs:
            self._beat = now
        for job in jobs:
            job.submitted = now
            self._jobs[job.order.number] = job
        self.metrics.waiting.inc(len(jobs))
        self.link.send(Submit([job.order for job in jobs]))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End texts early."""
        numbers = [job.order.number for job in jobs if not job.finished and job.order.number in self._jobs]
        if numbers:
            self.link.send(Cancel(numbers))

    def inspect(self, **fields: Any) -> tuple[int, Reports]:
        """Begin an inspection; return its number, and the queue that receives its reports.

        Args:
            **fields: those of ``InspectionOrder``, without the number.

        Raises:
            ApiError: 503 if the decoder is stuck or closed.

        """
        self._check()
        number, reports = self.number(), Reports()
        self._inspections[number] = reports
        self.link.send(InspectionOrder(number=number, **fields))
        return number, reports

    def end_inspection(self, number: int) -> None:
        """End an inspection: it is complete, or its client has left."""
        if self._inspections.pop(number, None) is not None:
            self.link.send(Cancel([number]))

    def _check(self) -> None:
        if (trouble := self.trouble) is not None:
            raise ApiError(503, f"{trouble}; try again later", code="unavailable", retry_after=5)

    # -------------------------------------------------------------------------------- from the worker

    def _receive(self, batch: Batch) -> None:
        """Sort events by text, and deliver those of texts that have ended, or all if it is time."""
        now = self._beat = time.monotonic()
        metrics, jobs = self.metrics, self._jobs
        metrics.busy_slots.set(batch.busy_slots)
        metrics.failures.inc(batch.failures)
        self._broken = batch.broken
        for number, read in batch.prompts:
            if (job := jobs.get(number)) is not None:
                metrics.prompt_tokens.inc(len(job.order.prompt))
                self._left_queue(job)
                self._collect(job, read)
        ended: list[Job] = []
        tokens = list(batch.generated())
        for new in tokens:
            if (job := jobs.get(new.number)) is not None:
                metrics.token(new, job)
                job.last_token = new.when
                self._collect(job, new)
                if new.last:
                    ended.append(job)
        metrics.count(len(tokens), now)
        for number, event in batch.ends:
            if (job := jobs.get(number)) is not None:
                if isinstance(event, Ended):
                    metrics.cancelled.inc(event.cancelled)
                self._collect(job, event)
                ended.append(job)
        for job in ended:
            self._end(job, now)
            self._deliver(job)
        for number, report in batch.reports:
            if (reports := self._inspections.get(number)) is not None:
                reports.put_nowait(report)
        if self._undelivered and self._timer is None:
            texts = min(len(jobs), self.options.max_batch_size)
            left = self._delivered + min(LONGEST_SECONDS, texts / CHUNKS_PER_SECOND) - now
            if left > 0.001:
                self._timer = asyncio.get_running_loop().call_later(left, self._deliver_all)
            else:
                self._deliver_all()

    def _collect(self, job: Job, event: Event) -> None:
        if not job.undelivered:
            self._undelivered[job.order.number] = job
        job.undelivered.append(event)

    def _deliver_all(self) -> None:
        self._timer, self._delivered = None, time.monotonic()
        for job in list(self._undelivered.values()):
            self._deliver(job)

    def _deliver(self, job: Job) -> None:
        """Give a request the events of one of its texts."""
        if self._undelivered.pop(job.order.number, None) is not None:
            job.events.put_nowait((job, job.undelivered))
            job.undelivered = []

    def _left_queue(self, job: Job) -> None:
        if job.waiting:
            job.waiting = False
            self.metrics.waiting.dec()

    def _end(self, job: Job, now: float) -> None:
        del self._jobs[job.order.number]
        job.finished = True
        self._left_queue(job)
        self._seconds += 0.1 * (now - job.submitted - self._seconds)

    def _lost(self) -> None:
        """End everything: the worker's process has ended."""
        self._broken = "the process of the model has ended"
        error = ApiError(503, f"{self._broken}; try again later", code="unavailable", retry_after=5)
        ends: list[tuple[int, Failed | Ended]] = [(number, Failed(error)) for number in self._jobs]
        self._receive(Batch(ends=ends, broken=self._broken))
        for reports in self._inspections.values():
            reports.put_nowait(error)
        if self.on_lost is not None:
            self.on_lost()
