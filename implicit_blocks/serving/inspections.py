"""Inspections of a worker: reports of the searches behind tokens, computed between the decoder's steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import InspectionOrder, Report
from implicit_blocks.serving.language import Language
from implicit_blocks.serving.reports import token_reports
from implicit_blocks.serving.word_problem import WordProblem

_LOG = logging.getLogger(__name__)

SHARE = 0.2
"""The share of the worker's time that inspections have while texts are decoded."""

Reports = list[tuple[int, Report | ApiError | None]]
"""Reports with the numbers of their orders, as in ``Batch.reports``."""


class Inspections:
    """The texts that a worker reports on, one token of each in turn.

    Args:
        language: gives the text of tokens.
        problem: the word problem that the model was trained on.

    """

    def __init__(self, language: Language, problem: WordProblem | None = None) -> None:
        self.language, self.problem = language, problem
        self._running: deque[tuple[InspectionOrder, Iterator[Report] | None]] = deque()
        self._next = 0.0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._running)

    def add(self, order: InspectionOrder) -> None:
        """Report on a text."""
        self._running.append((order, None))

    def cancel(self, numbers: Sequence[int]) -> None:
        """End the orders with these numbers."""
        self._running = deque(one for one in self._running if one[0].number not in numbers)

    def advance(self, decoder: ContinuousDecoder, found: Reports) -> None:
        """Append the report on one token, unless the reports have had their share of the time."""
        if not self._running or (decoder.busy and time.monotonic() < self._next):
            return
        order, reports = self._running.popleft()
        began = time.monotonic()
        try:
            reports, report = self._report(order, reports, decoder)
        except Exception as error:
            _LOG.exception("an inspection failed: %s", order.name)
            message = f"inspection {order.name} failed ({type(error).__name__}); other requests continue"
            found.append((order.number, ApiError(500, f"{message}. The server's log has the cause")))
        else:
            found.append((order.number, report))
            if report is not None:
                self._running.append((order, reports))
        now = time.monotonic()
        self._next = now + (now - began) * (1 / SHARE - 1)

    def fail_all(self, error: ApiError, found: Reports) -> None:
        """End all texts by an error."""
        found += [(order.number, error) for order, _ in self._running]
        self._running.clear()

    def _report(
        self, order: InspectionOrder, reports: Iterator[Report] | None, decoder: ContinuousDecoder
    ) -> tuple[Iterator[Report], Report | None]:
        batch = decoder.batch
        with batch.precision():
            if reports is None:
                reports = token_reports(
                    batch.model,
                    self.language,
                    order.prompt,
                    order.continuation,
                    batch.options.limited(order.tolerance, order.max_iterations),
                    problem=self.problem,
                    weights=batch.weights,
                )
            return reports, next(reports, None)
