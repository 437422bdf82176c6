"""The worker of a model: it takes orders from a queue, decodes them together, and reports their events.

Only its thread touches the model.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from implicit_blocks.decoding import ContinuousDecoder, NewToken, Request
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.inspections import Inspections
from implicit_blocks.serving.jobs import (
    Batch,
    Cancel,
    Ended,
    Failed,
    GeneratedToken,
    InspectionOrder,
    Message,
    Order,
    PromptRead,
    Submit,
)
from implicit_blocks.serving.outbox import Outbox, Send
from implicit_blocks.serving.penalties import processors_of
from implicit_blocks.serving.scores import first_alike, log_probabilities, score_orders
from implicit_blocks.solution import Solution

_LOG = logging.getLogger(__name__)


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


class Worker:
    """A decoder, the texts that have not ended, and the thread that decodes them.

    Args:
        model: the model, for scoring prompts.
        make_decoder: creates the decoder, also after a failure.
        inspections: reports of searches, computed between the decoder's steps.
        beat_seconds: a decoder with texts and without tokens sends an empty batch after this time, as a sign
            of progress.

    Raises:
        ValueError: as for ``ContinuousDecoder``.

    """

    def __init__(
        self,
        model: Any,
        make_decoder: Callable[[], Decoder],
        inspections: Inspections,
        *,
        beat_seconds: float,
    ) -> None:
        self.model, self._make, self.inspections = model, make_decoder, inspections
        self.decoder = make_decoder()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """What the thread shall do; None: end."""
        self._orders: dict[int, Order] = {}
        """All texts that have not ended, by the number of their order."""
        self._decoding: dict[int, Order] = {}
        """Those that the decoder has, by its own numbers."""
        self._to_score: deque[Order] = deque()
        self._scored: dict[int, PromptRead] = {}
        """The scores of prompts whose texts wait for a slot."""
        self._batch = Batch()
        self._urgent = False
        self._beat_seconds, self._sent = beat_seconds, -math.inf
        self._broken: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, send: Send) -> None:
        """Start the thread; ``send`` receives what it reports, in another thread."""
        self._thread = threading.Thread(target=self._run, args=(send,), name="decoder", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread after its current step, and wait for it; texts that have not ended fail."""
        self.inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=seconds)

    def _run(self, send: Send) -> None:
        outbox = Outbox(send)
        while self._broken is None:
            try:
                if not self._receive():
                    break
                self._score()
                if isinstance(self.decoder, ContinuousDecoder):
                    self.inspections.advance(self.decoder, self._batch.reports)
                if self.decoder.busy:
                    self._deliver(self.decoder.step())
            except Exception as error:
                self._recover(error)
            self._flush(outbox)
        self._fail_all(ApiError(503, f"{self._broken or 'the server is shutting down'}; try again later"))
        self._flush(outbox)
        outbox.close()

    def _flush(self, outbox: Outbox) -> None:
        """Send what has happened, and otherwise a sign of progress if the last one is long ago."""
        batch, now = self._batch, time.monotonic()
        anything = batch.tokens or batch.prompts or batch.ends or batch.reports or batch.failures
        if not anything and now - self._sent < self._beat_seconds:
            return
        urgent, self._urgent = self._urgent, False
        self._batch, self._sent = Batch(), now
        batch.busy_slots = sum(text is not None for text in self.decoder.texts)
        batch.broken = self._broken
        outbox.put(batch, urgent=urgent)

    def _receive(self) -> bool:
        """Take what has been sent, waiting for it if there is no work; False: end."""
        while True:
            idle = not (self.decoder.busy or self._to_score or self._batch.ends or self.inspections)
            try:
                message = self.inbox.get(block=idle)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, Cancel):
                self._cancel(message.numbers)
            elif isinstance(message, InspectionOrder):
                self.inspections.add(message)
            else:
                for order in message.orders:
                    self._orders[order.number] = order
                    to_score = order.score_prompt or order.max_tokens == 0
                    accept = self._to_score.append if to_score else self._begin
                    accept(order)

    def _begin(self, order: Order) -> None:
        try:
            number = self.decoder.submit(_request_of(order))
        except ValueError as error:  # the request is at fault, not the decoder
            self._end(order, Failed(ApiError(400, str(error))))
            return
        except Exception as error:
            _LOG.exception("a text was not accepted")
            self._end(order, Failed(_failure(order, error)))
            return
        self._decoding[number] = order
        self.decoder.on_prompts = self._prompts_read

    def _cancel(self, numbers: Sequence[int]) -> None:
        self.inspections.cancel(numbers)
        for number in numbers:
            if (order := self._orders.get(number)) is None:  # it has ended meanwhile
                continue
            for own in [own for own, other in self._decoding.items() if other is order]:
                self.decoder.cancel(own)
                del self._decoding[own]
            if order in self._to_score:
                self._to_score.remove(order)
            self._end(order, Ended(cancelled=True))

    def _score(self) -> None:
        """Score the prompts at the head of the queue that share their limits, and submit their texts."""
        if not self._to_score:
            return
        together = first_alike(self._to_score)
        try:
            scored = score_orders(self.model, together)
        except Exception as error:
            _LOG.exception("scoring prompts failed")
            for order in together:
                self._end(order, Failed(_failure(order, error)))
            return
        for order, read in zip(together, scored, strict=True):
            if order.max_tokens:
                self._scored[order.number] = read
                self._begin(order)
            else:
                self._batch.prompts.append((order.number, read))
                self._end(order, Ended(cancelled=False))

    def _prompts_read(self, numbers: list[int], solution: Solution | None) -> None:
        iterations = None if solution is None else solution.iterations.tolist()
        for row, number in enumerate(numbers):
            if (order := self._decoding.get(number)) is None:
                continue
            read = self._scored.pop(order.number, None)
            if read is None:
                read = PromptRead(None if iterations is None else int(iterations[row]))
            self._batch.prompts.append((order.number, read))

    def _deliver(self, tokens: Sequence[NewToken]) -> None:
        now, found = time.monotonic(), self._batch.tokens
        for new in tokens:
            order = self._decoding.get(new.request)
            if order is None:
                continue
            score = None
            if order.logprobs is not None:
                (score,) = log_probabilities(new.logits[None], [new.token], order.logprobs)
            residual = new.residual if new.residual is not None and math.isfinite(new.residual) else None
            found.append(
                GeneratedToken(
                    order.number, now, new.token, new.last, new.iterations, residual, new.converged, score
                )
            )
            if new.last:
                del self._decoding[new.request], self._orders[order.number]
                self._urgent = True

    def _end(self, order: Order, event: Failed | Ended) -> None:
        if self._orders.pop(order.number, None) is not None:
            self._scored.pop(order.number, None)
            self._batch.ends.append((order.number, event))
            self._urgent = True

    def _recover(self, error: Exception) -> None:
        """Fail the texts in the slots, and continue the waiting ones with a new decoder."""
        waiting = {text.number for text in self.decoder.waiting}
        survivors = [order for number, order in self._decoding.items() if number in waiting]
        failed = [order for number, order in self._decoding.items() if number not in waiting]
        named = ", ".join(order.name for order in failed)
        _LOG.error("the decoder failed; these requests are lost: %s", named or "none", exc_info=error)
        self._batch.failures += 1
        for order in failed:
            self._end(order, Failed(_failure(order, error)))
        self._decoding = {}
        try:
            self.decoder = self._make()
        except Exception as again:
            _LOG.exception("the decoder cannot be created again")
            self._broken = f"the decoder failed ({type(again).__name__}) and could not be restarted"
            for order in survivors:
                self._end(order, Failed(ApiError(503, f"{self._broken}; restart the server")))
            return
        for order in survivors:
            self._begin(order)

    def _fail_all(self, error: ApiError) -> None:
        while True:
            try:
                message = self.inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, Submit):
                self._orders.update((order.number, order) for order in message.orders)
            elif isinstance(message, InspectionOrder):
                self.inspections.add(message)
        self.inspections.fail_all(error, self._batch.reports)
        for order in list(self._orders.values()):
            self._end(order, Failed(error))


def _request_of(order: Order) -> Request:
    """Return a text's request to the decoder."""
    processors, sampling = processors_of(order.choice, prompt=len(order.prompt))
    return Request(
        prompt=order.prompt,
        max_new_tokens=order.max_tokens,
        sampling=sampling,
        logits_processor=processors or None,
        seed=order.seed,
        stop_token_ids=order.stop_token_ids,
        tolerance=order.tolerance,
        max_iterations=order.max_iterations,
    )


def _failure(order: Order, error: Exception) -> ApiError:
    return ApiError(
        500,
        f"request {order.name} failed in the decoder ({type(error).__name__}); other requests continue. The "
        "server's log has the cause",
        code="decoder_failure",
    )
