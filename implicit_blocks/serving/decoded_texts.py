"""The texts of a worker: from orders to the decoder, and from its tokens to events."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from implicit_blocks.decoding import NewToken, Request
from implicit_blocks.serving.arrivals import Arrivals
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import Batch, Ended, Failed, GeneratedToken, Order, PromptRead
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


class DecodedTexts:
    """A decoder, and the texts that have not ended.

    Args:
        model: the model, for scoring prompts.
        make_decoder: creates the decoder, also after a failure.

    Raises:
        ValueError: as for ``ContinuousDecoder``.

    """

    def __init__(self, model: Any, make_decoder: Callable[[], Decoder]) -> None:
        self.model, self._make = model, make_decoder
        self.decoder = make_decoder()
        self.batch = Batch()
        """What has happened since the last batch was taken."""
        self.urgent = False
        """Whether a text has ended since."""
        self.broken: str | None = None
        """Why the decoder cannot continue, None while it can."""
        self._orders: dict[int, Order] = {}
        """All texts that have not ended, by the number of their order."""
        self._decoding: dict[int, Order] = {}
        """Those that the decoder has, by its own numbers."""
        self._arrivals = Arrivals()
        self._to_score: deque[Order] = deque()
        self._scored: dict[int, PromptRead] = {}
        """The scores of prompts whose texts wait for a slot."""
        self._began = 0.0
        """When the current step began, or the prompts that it solves."""

    @property
    def busy(self) -> bool:
        """Whether ``step`` has work, apart from texts that wait for others."""
        return self.decoder.busy or bool(self._to_score)

    def seconds_to_gather(self) -> float | None:
        """Return for how long texts still wait for others to arrive, None if none waits."""
        if not self._arrivals.orders:
            return None
        free = sum(text is None for text in self.decoder.texts) - len(self.decoder.waiting)
        return self._arrivals.left(time.monotonic(), free=free)

    @property
    def solves_prompts(self) -> bool:
        """Whether the next step begins with the prompts of new texts."""
        return bool(self._to_score) or self.seconds_to_gather() == 0

    def take(self) -> Batch:
        """Return what has happened, and begin anew."""
        batch = self.batch
        self.batch, self.urgent = Batch(), False
        batch.busy_slots = sum(text is not None for text in self.decoder.texts)
        batch.broken = self.broken
        return batch

    def accept(self, orders: Sequence[Order]) -> None:
        """Queue texts."""
        arrived: list[Order] = []
        for order in orders:
            self._orders[order.number] = order
            to_score = order.score_prompt or order.max_tokens == 0
            (self._to_score if to_score else arrived).append(order)
        if arrived:
            self._arrivals.add(arrived, time.monotonic())

    def cancel(self, numbers: Sequence[int]) -> None:
        """End texts early, those that have not ended."""
        for number in numbers:
            if (order := self._orders.get(number)) is None:
                continue
            for own in [own for own, other in self._decoding.items() if other is order]:
                self.decoder.cancel(own)
                del self._decoding[own]
            for queued in (self._to_score, self._arrivals.orders):
                if order in queued:
                    queued.remove(order)
            self._end(order, Ended(cancelled=True))

    def step(self) -> None:
        """Submit texts, score prompts, and let the decoder make its next tokens."""
        if self.seconds_to_gather() == 0:
            for order in self._arrivals.take():
                self._begin(order)
        self._score()
        if self.decoder.busy:
            self._began = time.monotonic()
            self._deliver(self.decoder.step())

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
                self.batch.prompts.append((order.number, read))
                self._end(order, Ended(cancelled=False))

    def _prompts_read(self, numbers: list[int], solution: Solution | None) -> None:
        iterations = None if solution is None else solution.iterations.tolist()
        began, self._began = self._began, time.monotonic()
        self._arrivals.took(self._began - began)
        for row, number in enumerate(numbers):
            if (order := self._decoding.get(number)) is None:
                continue
            read = self._scored.pop(order.number, None)
            if read is None:
                read = PromptRead(None if iterations is None else int(iterations[row]))
            self.batch.prompts.append((order.number, read))

    def _deliver(self, tokens: Sequence[NewToken]) -> None:
        now, found = time.monotonic(), self.batch.tokens
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
                self.urgent = True

    def _end(self, order: Order, event: Failed | Ended) -> None:
        if self._orders.pop(order.number, None) is not None:
            self._scored.pop(order.number, None)
            self.batch.ends.append((order.number, event))
            self.urgent = True

    def recover(self, error: Exception) -> None:
        """Fail the texts in the slots, and continue the waiting ones with a new decoder."""
        waiting = {text.number for text in self.decoder.waiting}
        survivors = [order for number, order in self._decoding.items() if number in waiting]
        failed = [order for number, order in self._decoding.items() if number not in waiting]
        named = ", ".join(order.name for order in failed)
        _LOG.error("the decoder failed; these requests are lost: %s", named or "none", exc_info=error)
        self.batch.failures += 1
        for order in failed:
            self._end(order, Failed(_failure(order, error)))
        self._decoding = {}
        try:
            self.decoder = self._make()
        except Exception as again:
            _LOG.exception("the decoder cannot be created again")
            self.broken = f"the decoder failed ({type(again).__name__}) and could not be restarted"
            for order in survivors:
                self._end(order, Failed(ApiError(503, f"{self.broken}; restart the server")))
            return
        for order in survivors:
            self._begin(order)

    def fail_all(self, error: ApiError) -> None:
        """End all texts by an error."""
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
