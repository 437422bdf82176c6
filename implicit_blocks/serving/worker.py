"""The worker of a model: its thread takes messages from a queue, decodes texts together, and reports events.

Only this thread touches the model.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.serving.decoded_texts import DecodedTexts, Decoder
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.inspections import Inspections
from implicit_blocks.serving.jobs import Cancel, InspectionOrder, Message, Submit
from implicit_blocks.serving.links import Send

DELIVERY_SECONDS = 0.01
"""The least time between two deliveries, unless a text has ended, whose client may send the next one."""


class Worker:
    """A model's texts and inspections, and the thread that works on them.

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
        self.texts, self.inspections = DecodedTexts(model, make_decoder), inspections
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """What the thread shall do; None: end."""
        self._beat_seconds, self._sent = beat_seconds, -math.inf
        self._all_sent = True
        """Whether the last delivery waited until all was sent."""
        self._thread: threading.Thread | None = None

    @property
    def decoder(self) -> Decoder:
        """The decoder, a new one after a failure."""
        return self.texts.decoder

    def start(self, send: Send) -> None:
        """Start the thread, which also sends what it reports.

        A thread for that would take the interpreter from the decoder for longer than sending takes.
        """
        self._thread = threading.Thread(target=self._run, args=(send,), name="decoder", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread after its current step, and wait for it; texts that have not ended fail."""
        self.inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=seconds)

    def _run(self, send: Send) -> None:
        texts = self.texts
        texts.before_prompts = lambda: self._deliver(send, everything=True)
        while texts.broken is None:
            try:
                if not self._receive(send):
                    break
                if self.inspections:  # which take longer than a step
                    self._deliver(send, everything=True)
                if isinstance(self.decoder, ContinuousDecoder):
                    self.inspections.advance(self.decoder, texts.batch.reports)
                texts.step()
            except Exception as error:
                texts.recover(error)
            self._deliver(send)
        self._fail_all(ApiError(503, f"{texts.broken or 'the server is shutting down'}; try again later"))
        self._deliver(send, everything=True)

    def _deliver(self, send: Send, *, everything: bool = False) -> None:
        """Send what has happened if it is time; otherwise a sign of progress if the last one is long ago."""
        past = time.monotonic() - self._sent
        if everything:
            due = not (self.texts.batch.is_empty and self._all_sent)
        elif self.texts.batch.is_empty:
            due = past >= self._beat_seconds
        else:
            due = self.texts.urgent or past >= DELIVERY_SECONDS
        if due:
            send(self.texts.take(), everything)
            self._sent, self._all_sent = time.monotonic(), everything

    def _receive(self, send: Send) -> bool:
        """Take what has been sent, waiting for it if there is no work; False: end."""
        while True:
            waits = not (self.texts.busy or self.inspections)
            if waits:
                self._deliver(send, everything=True)
            try:
                message = self.inbox.get(block=waits)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._take(message)

    def _take(self, message: Submit | Cancel | InspectionOrder) -> None:
        if isinstance(message, Cancel):
            self.texts.cancel(message.numbers)
            self.inspections.cancel(message.numbers)
        elif isinstance(message, InspectionOrder):
            self.inspections.add(message)
        else:
            self.texts.accept(message.orders)

    def _fail_all(self, error: ApiError) -> None:
        while not self.inbox.empty():
            if (message := self.inbox.get()) is not None:
                self._take(message)
        self.inspections.fail_all(error, self.texts.batch.reports)
        self.texts.fail_all(error)
