"""``/v1/inspect``: reports of the searches behind tokens, computed between the decoder's steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.serving.bodies import MOST_TOKENS, read
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.events import END, event
from implicit_blocks.serving.language import Language
from implicit_blocks.serving.reports import token_reports
from implicit_blocks.serving.word_problem import WordProblem

if TYPE_CHECKING:
    from implicit_blocks.serving.served import ServedModel

_LOG = logging.getLogger(__name__)

MOST_INSPECTED = 1024
"""Maximum number of tokens of a request."""
MOST_INSPECTIONS = 16
"""Maximum number of requests of a model at the same time."""
SHARE = 0.2
"""The share of the thread's time that inspections have while texts are decoded."""

Report = dict[str, Any]


class InspectionBody(BaseModel):
    """The body of ``/v1/inspect``."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    prompt: Any
    continuation: Annotated[list[int], Field(max_length=MOST_INSPECTED)] | None = None
    tolerance: Annotated[float, Field(gt=0, le=1e6)] | None = None
    max_iterations: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    stream: bool | None = None


@dataclass(kw_only=True, eq=False)
class InspectionJob:
    """A text to report on; ``send`` receives the reports, an error that ends them, and None at the end."""

    name: str
    prompt: Sequence[int]
    continuation: Sequence[int]
    language: Language
    problem: WordProblem | None
    tolerance: float | None
    max_iterations: int | None
    send: Callable[[Report | ApiError | None], None]
    cancelled: bool = False
    """Set by the event loop once the client has left."""
    reports: Iterator[Report] | None = field(default=None, repr=False)


class Inspections:
    """The texts that a decoder's thread reports on, one token of each in turn."""

    def __init__(self) -> None:
        self._running: deque[InspectionJob] = deque()
        self._next = 0.0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._running)

    def add(self, inspection: InspectionJob) -> None:
        """Report on a text."""
        self._running.append(inspection)

    def advance(self, decoder: ContinuousDecoder) -> None:
        """Report on one token, unless texts are decoded and the reports have had their share of the time."""
        if not self._running or (decoder.busy and time.monotonic() < self._next):
            return
        inspection = self._running.popleft()
        if inspection.cancelled:
            return
        began = time.monotonic()
        try:
            report = self._report(inspection, decoder)
        except Exception as error:
            _LOG.exception("an inspection failed: %s", inspection.name)
            message = f"inspection {inspection.name} failed ({type(error).__name__}); other requests continue"
            inspection.send(ApiError(500, f"{message}. The server's log has the cause"))
        else:
            inspection.send(report)
            if report is not None:
                self._running.append(inspection)
        now = time.monotonic()
        self._next = now + (now - began) * (1 / SHARE - 1)

    def fail_all(self, error: ApiError) -> None:
        """End all texts by an error."""
        while self._running:
            self._running.popleft().send(error)

    @staticmethod
    def _report(inspection: InspectionJob, decoder: ContinuousDecoder) -> Report | None:
        batch = decoder.batch
        with batch.precision():
            if inspection.reports is None:
                options = batch.options
                tolerance, most = inspection.tolerance, inspection.max_iterations
                if tolerance is not None:
                    options = replace(options, tolerance=tolerance)
                if most is not None:
                    options = replace(options, max_iterations=most)
                inspection.reports = token_reports(
                    batch.model,
                    inspection.language,
                    inspection.prompt,
                    inspection.continuation,
                    options,
                    problem=inspection.problem,
                    weights=batch.weights,
                )
            return next(inspection.reports, None)


# ------------------------------------------------------------------------------------ requests


def add_inspections(
    app: FastAPI,
    find: Callable[[str], ServedModel],
    read_body: Callable[[Request], Awaitable[bytes]],
    dependencies: Sequence[Any],
) -> None:
    """Add the endpoint; ``find`` returns the model of a name."""
    running: dict[str, set[_Reports]] = {}

    @app.post("/v1/inspect", dependencies=list(dependencies))
    async def inspect(request: Request) -> Response:
        body = read(InspectionBody, await read_body(request))
        served = find(body.model)
        if not isinstance(served.model, LanguageModel):
            message = f"{served.name} is a model of transformers, which does not search; choose another"
            raise ApiError(400, message, param="model")
        others = running.setdefault(served.name, set())
        if len(others) >= MOST_INSPECTIONS:
            raise ApiError(
                429,
                f"{MOST_INSPECTIONS} inspections are running; try again after the seconds in Retry-After",
                code="queue_full",
                retry_after=1,
            )
        reports = _Reports(served, body, others)
        if body.stream:
            return _Stream(reports)
        tokens = []
        try:
            async for report in reports:
                tokens.append(report)
                if await request.is_disconnected():
                    break
        finally:
            reports.close()
        found = {"object": "inspection", "model": served.name, "tokens": tokens}
        return Response(_dumped(found), media_type="application/json")


class _Reports:
    """The reports of a request, as they arrive.

    Args:
        served: the model.
        body: the request.
        running: the requests of the model, this one included until it is closed.

    Raises:
        ApiError: 400 for a text or limits that the model cannot take, 503 if its decoder is stuck.

    """

    def __init__(self, served: ServedModel, body: InspectionBody, running: set[_Reports]) -> None:
        self._arrived: asyncio.Queue[Report | ApiError | None] = asyncio.Queue()
        self._ends = time.monotonic() + served.options.timeout
        self._running = running
        loop = asyncio.get_running_loop()

        def send(report: Report | ApiError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed without waiting for the thread
                loop.call_soon_threadsafe(self._arrived.put_nowait, report)

        prompt, continuation = served.checked_text(body)
        self._inspection = InspectionJob(
            name=f"insp-{secrets.token_hex(12)}",
            prompt=prompt,
            continuation=continuation,
            language=served.language,
            problem=served.problem,
            tolerance=body.tolerance,
            max_iterations=body.max_iterations,
            send=send,
        )
        if (trouble := served.engine.trouble) is not None:
            raise ApiError(503, f"{trouble}; try again later", code="unavailable", retry_after=5)
        running.add(self)
        served.engine.worker.inbox.put(self._inspection)

    async def __aiter__(self) -> AsyncIterator[Report]:
        while True:
            try:
                left = max(0.0, self._ends - time.monotonic())
                report = await asyncio.wait_for(self._arrived.get(), left)
            except TimeoutError:
                raise ApiError(
                    504, "the inspection took too long; send fewer tokens", code="timeout"
                ) from None
            if report is None:
                return
            if isinstance(report, ApiError):
                raise report
            yield report

    def close(self) -> None:
        """End the inspection: it is complete or cancelled."""
        self._inspection.cancelled = True
        self._running.discard(self)


class _Stream(StreamingResponse):
    """A stream of reports that ends when the client leaves, also before its first event."""

    def __init__(self, reports: _Reports) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(reports), media_type="text/event-stream", headers=headers)
        self._reports = reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reports.close()


async def _events(reports: _Reports) -> AsyncIterator[bytes]:
    try:
        async for report in reports:
            yield event(report)
    except ApiError as error:
        yield event(error.body())
    yield END


def _dumped(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
