"""The decoder's thread: it takes texts from a queue, decodes them together, and sends their events.

Only this thread touches the model.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from implicit_blocks.decoding import ContinuousDecoder, NewToken, Request
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.inspect_api import InspectionJob, Inspections
from implicit_blocks.serving.jobs import Event, Failed, GeneratedToken, Job, LogProbability, PromptRead
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.scores import log_probabilities, score_prompts
from implicit_blocks.solution import Solution

_LOG = logging.getLogger(__name__)

SCORED_TOGETHER = 8192
"""Maximum number of prompt tokens, padding included, that are scored together."""

Send = Callable[[Sequence[tuple[Job, Event]], Sequence[float]], None]


class Decoder(Protocol):
    """What the thread needs of a decoder: the interface of ``ContinuousDecoder``."""

    on_prompts: Callable[[list[int], Solution | None], None] | None

    @property
    def accepts_limits(self) -> bool:
        """Whether requests can have their own tolerance and maximum number of iterations."""

    @property
    def texts(self) -> Sequence[Any]:
        """The text of each slot, None where a slot is free."""

    @property
    def waiting(self) -> Collection[Any]:
        """The texts that wait, each with its ``number``."""

    @property
    def busy(self) -> bool:
        """Whether a text has not ended."""

    def submit(self, request: Request) -> int:
        """Queue a prompt and return its number."""

    def cancel(self, number: int) -> bool:
        """End a text early."""

    def step(self) -> list[NewToken]:
        """Return the next tokens that are known, possibly none."""


@dataclass(frozen=True)
class Submit:
    """Texts to generate."""

    jobs: Sequence[Job]


@dataclass(frozen=True)
class Cancel:
    """Texts to end."""

    jobs: Sequence[Job]


class Worker:
    """What the thread knows: its decoder, and the texts that have not ended.

    Args:
        model: the model, for scoring prompts.
        metrics: what is counted.
        make_decoder: creates the decoder, also after a failure.
        send: receives events, and the seconds that each ended text took.

    Raises:
        ValueError: as for ``ContinuousDecoder``.

    """

    def __init__(self, model: Any, metrics: Metrics, make_decoder: Callable[[], Decoder], send: Send) -> None:
        self.model, self.metrics, self._make, self._send_events = model, metrics, make_decoder, send
        self.decoder = make_decoder()
        self.inspections = Inspections()
        self.inbox: queue.SimpleQueue[Submit | Cancel | InspectionJob | None] = queue.SimpleQueue()
        """What the thread shall do; None: end."""
        self.beat = time.monotonic()
        """When the thread last made progress."""
        self.broken: str | None = None
        """Why the decoder cannot continue, None while it can."""
        self._jobs: dict[int, Job] = {}
        self._to_score: deque[Job] = deque()
        self._outbox: list[tuple[Job, Event]] = []
        self._ended: list[float] = []

    def run(self) -> None:
        """Work until the queue says to end; texts that have not ended fail."""
        while True:
            try:
                if not self._receive():
                    break
                self._score()
                if isinstance(self.decoder, ContinuousDecoder):
                    self.inspections.advance(self.decoder)
                if self.decoder.busy:
                    self._deliver(self.decoder.step())
            except Exception as error:
                self._recover(error)
            self.beat = time.monotonic()
            self.metrics.busy_slots.set(sum(text is not None for text in self.decoder.texts))
            self._send()
            if self.broken is not None:
                break
        self._fail_all(ApiError(503, f"{self.broken or 'the server is shutting down'}; try again later"))
        self._send()

    def _receive(self) -> bool:
        """Take what the event loop has sent, waiting for it if there is no work; False: close."""
        while True:
            idle = not (self.decoder.busy or self._to_score or self._ended or self.inspections)
            try:
                message = self.inbox.get(block=idle)
            except queue.Empty:
                return True
            self.beat = time.monotonic()
            if message is None:
                return False
            if isinstance(message, Cancel):
                self._cancelled(message.jobs)
            elif isinstance(message, InspectionJob):
                self.inspections.add(message)
            else:
                for job in message.jobs:
                    to_score = job.score_prompt or job.max_tokens == 0
                    accept = self._to_score.append if to_score else self._begin
                    accept(job)

    def _begin(self, job: Job) -> None:
        if job.finished:
            return
        try:
            number = self.decoder.submit(_request_of(job))
        except ValueError as error:  # the request is at fault, not the decoder
            self._end(job, Failed(ApiError(400, str(error))))
            return
        self._jobs[number] = job
        self.decoder.on_prompts = self._prompts_read

    def _cancelled(self, jobs: Sequence[Job]) -> None:
        numbers = {id(job): number for number, job in self._jobs.items()}
        for job in jobs:
            if job.finished:
                continue
            if (number := numbers.get(id(job))) is not None:
                self.decoder.cancel(number)
            elif job in self._to_score:
                self._to_score.remove(job)
            self.metrics.cancelled.inc()
            self._end(job, None)

    def _score(self) -> None:
        """Score the prompts at the head of the queue that share their limits, and submit their texts."""
        if not self._to_score:
            return
        first = self._to_score[0]
        together: list[Job] = []
        longest = 0
        while self._to_score:
            job = self._to_score[0]
            longest = max(longest, len(job.prompt))
            alike = (job.tolerance, job.max_iterations) == (first.tolerance, first.max_iterations)
            if together and (not alike or longest * (len(together) + 1) > SCORED_TOGETHER):
                break
            together.append(self._to_score.popleft())
        wanted = [job for job in together if job.score_prompt and job.logprobs is not None]
        options = SearchOptions(tolerance=first.tolerance, max_iterations=first.max_iterations)
        scored: dict[int, tuple[list[LogProbability], int | None]] = {}
        try:
            if wanted:
                counts = [job.logprobs or 0 for job in wanted]
                found = score_prompts(self.model, [job.prompt for job in wanted], counts, options)
                scored = {id(job): one for job, one in zip(wanted, found, strict=True)}
        except Exception as error:
            _LOG.exception("scoring prompts failed")
            for job in together:
                self._end(job, Failed(_failure(job, error)))
            return
        for job in together:
            scores, iterations = scored.get(id(job), (None, None))
            self._outbox.append((job, PromptRead(iterations, scores)))
            if job.max_tokens:
                self._begin(job)
            else:
                self.metrics.prompt_tokens.inc(len(job.prompt))
                self._end(job, None)

    def _prompts_read(self, numbers: list[int], solution: Solution | None) -> None:
        for row, number in enumerate(numbers):
            job = self._jobs.get(number)
            if job is None:
                continue
            self.metrics.prompt_tokens.inc(len(job.prompt))
            self.metrics.waiting.dec()
            job.waiting = False
            if not job.score_prompt:
                iterations = None if solution is None else int(solution.iterations[row])
                self._outbox.append((job, PromptRead(iterations)))

    def _deliver(self, tokens: Sequence[NewToken]) -> None:
        now = time.monotonic()
        for new in tokens:
            job = self._jobs.get(new.request)
            if job is None:
                continue
            score = None
            if job.logprobs is not None:
                (score,) = log_probabilities(new.logits[None], [new.token], job.logprobs)
            residual = new.residual if new.residual is not None and math.isfinite(new.residual) else None
            event = GeneratedToken(new.token, new.last, new.iterations, residual, new.converged, score)
            self.metrics.token(event, job, now)
            job.last_token = now
            if new.last:
                del self._jobs[new.request]
                self._end(job, event)
            else:
                self._outbox.append((job, event))

    def _end(self, job: Job, event: Event | None) -> None:
        if job.finished:
            return
        job.finished = True
        if job.waiting:
            job.waiting = False
            self.metrics.waiting.dec()
        for number in [number for number, other in self._jobs.items() if other is job]:
            del self._jobs[number]
        self._ended.append(time.monotonic() - job.submitted)
        if event is not None:
            self._outbox.append((job, event))

    def _recover(self, error: Exception) -> None:
        """Fail the texts in the slots, and continue the waiting ones with a new decoder."""
        waiting = {text.number for text in self.decoder.waiting}
        survivors = [job for number, job in self._jobs.items() if number in waiting]
        failed = [job for number, job in self._jobs.items() if number not in waiting]
        named = ", ".join(job.name for job in failed)
        _LOG.error("the decoder failed; these requests are lost: %s", named or "none", exc_info=error)
        self.metrics.failures.inc()
        for job in failed:
            self._end(job, Failed(_failure(job, error)))
        self._jobs = {}
        try:
            self.decoder = self._make()
        except Exception as again:
            _LOG.exception("the decoder cannot be created again")
            self.broken = f"the decoder failed ({type(again).__name__}) and could not be restarted"
            for job in survivors:
                self._end(job, Failed(ApiError(503, f"{self.broken}; restart the server")))
            return
        for job in survivors:
            self._begin(job)

    def _fail_all(self, error: ApiError) -> None:
        while True:
            try:
                message = self.inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, Submit):
                self._to_score.extend(message.jobs)
            elif isinstance(message, InspectionJob):
                self.inspections.add(message)
        self.inspections.fail_all(error)
        for job in [*self._jobs.values(), *self._to_score]:
            self._end(job, Failed(error))
        self._jobs, self._to_score = {}, deque()

    def _send(self) -> None:
        if self._outbox or self._ended:
            self._send_events(self._outbox, self._ended)
            self._outbox, self._ended = [], []


def _request_of(job: Job) -> Request:
    """Return a text's request to the decoder."""
    return Request(
        prompt=job.prompt,
        max_new_tokens=job.max_tokens,
        sampling=job.sampling,
        logits_processor=job.logits_processor or None,
        seed=job.seed,
        stop_token_ids=job.stop_token_ids,
        tolerance=job.tolerance,
        max_iterations=job.max_iterations,
    )


def _failure(job: Job, error: Exception) -> ApiError:
    return ApiError(
        500,
        f"request {job.name} failed in the decoder ({type(error).__name__}); other requests continue. The "
        "server's log has the cause",
        code="decoder_failure",
    )
