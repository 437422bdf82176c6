"""The texts of a worker: from orders to the decoder, and from its tokens to events."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from implicit_blocks.decoding import ContinuousDecoder, NewToken, Request
from implicit_blocks.serving.baseline import TransformersDecoder
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import Batch, Ended, Failed, LogProbability, Order, PromptRead
from implicit_blocks.serving.penalties import processors_of
from implicit_blocks.serving.scores import first_alike, log_probabilities, score_orders
from implicit_blocks.solution import Solution

_LOG = logging.getLogger(__name__)


Decoder = ContinuousDecoder | TransformersDecoder


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
        self.before_prompts: Callable[[], None] | None = None
        """Called before prompts are solved, which takes longer than a token."""
        self._to_score: deque[Order] = deque()
        self._scored: dict[int, PromptRead] = {}
        """The scores of prompts whose texts wait for a slot."""

    @property
    def busy(self) -> bool:
        """Whether ``step`` has work."""
        return self.decoder.busy or bool(self._to_score)

    def take(self) -> Batch:
        """Return what has happened, and begin anew."""
        batch = self.batch
        self.batch, self.urgent = Batch(), False
        batch.busy_slots = sum(text is not None for text in self.decoder.texts)
        batch.broken = self.broken
        return batch

    def accept(self, orders: Sequence[Order]) -> None:
        """Queue texts."""
        for order in orders:
            self._orders[order.number] = order
            if order.score_prompt or order.max_tokens == 0:
                self._to_score.append(order)
            else:
                self._begin(order)

    def cancel(self, numbers: Sequence[int]) -> None:
        """End texts early, those that have not ended."""
        for number in numbers:
            if (order := self._orders.get(number)) is None:
                continue
            for own in [own for own, other in self._decoding.items() if other is order]:
                self.decoder.cancel(own)
                del self._decoding[own]
            if order in self._to_score:
                self._to_score.remove(order)
            self._end(order, Ended(cancelled=True))

    def step(self) -> None:
        """Score prompts, submit their texts, and let the decoder make its next tokens."""
        self._score()
        if self.decoder.busy:
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
        self.decoder.on_prompts, self.decoder.before_prompts = self._prompts_read, self.before_prompts

    def _score(self) -> None:
        """Score the prompts at the head of the queue that share their limits, and submit their texts."""
        if not self._to_score:
            return
        if self.before_prompts is not None:
            self.before_prompts()
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
        for row, number in enumerate(numbers):
            if (order := self._decoding.get(number)) is None:
                continue
            read = self._scored.pop(order.number, None)
            if read is None:
                read = PromptRead(None if iterations is None else int(iterations[row]))
            self.batch.prompts.append((order.number, read))

    def _deliver(self, tokens: Sequence[NewToken]) -> None:
        """Add the tokens of a step to the batch, by columns: there may be hundreds."""
        decoding = self._decoding
        known = [new for new in tokens if new.request in decoding]
        if not known:
            return
        requests, ids, lasts, logits, *search, _ = zip(*known, strict=True)
        orders = [decoding[request] for request in requests]
        scores: list[LogProbability | None] = [None] * len(orders)
        for place, order in enumerate(orders):
            if order.logprobs is not None:
                (scores[place],) = log_probabilities(logits[place][None], [ids[place]], order.logprobs)
        numbers = [order.number for order in orders]
        self.batch.tokens.append((time.monotonic(), numbers, ids, lasts, *search, scores))
        for request, last in zip(requests, lasts, strict=True) if any(lasts) else ():
            if last:
                del self._orders[decoding.pop(request).number]
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
