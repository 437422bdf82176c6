"""``/v1/inspect``: reports of the searches behind the tokens of a text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from implicit_blocks.serving.bodies import MOST_TOKENS, read
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.events import END, EventStream, event, json_response
from implicit_blocks.serving.jobs import Report

if TYPE_CHECKING:
    from implicit_blocks.serving.served import ServedModel

MOST_INSPECTED = 1024
"""Maximum number of tokens of a request."""
MOST_INSPECTIONS = 16
"""Maximum number of requests of a model at the same time."""


class InspectionBody(BaseModel):
    """The body of ``/v1/inspect``."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    prompt: Any
    continuation: Annotated[list[int], Field(max_length=MOST_INSPECTED)] | None = None
    tolerance: Annotated[float, Field(gt=0, le=1e6)] | None = None
    max_iterations: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    stream: bool | None = None


def add_inspections(
    app: FastAPI,
    find: Callable[[str], ServedModel],
    read_body: Callable[[Request], Awaitable[bytes]],
    dependencies: Sequence[Any],
) -> None:
    """Add the endpoint; ``find`` returns the model of a name."""

    @app.post("/v1/inspect", dependencies=list(dependencies))
    async def inspect(request: Request) -> Response:
        body = read(InspectionBody, await read_body(request))
        served = find(body.model)
        if served.description.kind == "transformers":
            message = f"{served.name} is a model of transformers, which does not search; choose another"
            raise ApiError(400, message, param="model")
        if served.engine.inspections >= MOST_INSPECTIONS:
            raise ApiError(
                429,
                f"{MOST_INSPECTIONS} inspections are running; try again after the seconds in Retry-After",
                code="queue_full",
                retry_after=1,
            )
        reports = _Reports(served, body)
        if body.stream:
            return EventStream(_events(reports), leave=reports.leave, close=reports.close)
        tokens = []
        try:
            async for report in reports:
                tokens.append(report)
                if await request.is_disconnected():
                    break
        finally:
            reports.close()
        return json_response({"object": "inspection", "model": served.name, "tokens": tokens})


class _Reports:
    """The reports of a request, as they arrive.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: 400 for a text or limits that the model cannot take, 503 if its decoder is stuck.

    """

    def __init__(self, served: ServedModel, body: InspectionBody) -> None:
        self._ends = time.monotonic() + served.options.timeout
        self._engine = served.engine
        prompt, continuation = served.checked_text(body)
        self._number, self._arrived = served.engine.inspect(
            name=f"insp-{secrets.token_hex(12)}",
            prompt=prompt,
            continuation=continuation,
            tolerance=body.tolerance,
            max_iterations=body.max_iterations,
        )

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

    def leave(self) -> None:
        """End the iteration: the client has left."""
        self._arrived.put_nowait(None)

    def close(self) -> None:
        """End the inspection: it is complete or cancelled."""
        self._engine.end_inspection(self._number)


async def _events(reports: _Reports) -> AsyncIterator[bytes]:
    try:
        async for report in reports:
            yield event(report)
    except ApiError as error:
        yield event(error.body())
    yield END
