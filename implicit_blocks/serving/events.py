"""Answers: server-sent events, streams of them, and JSON. Numbers that are not finite become null."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import Response, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

END = format_sse_event(data_str="[DONE]")
"""The event that ends a stream."""


def event(value: dict[str, Any]) -> bytes:
    """Return an object as an event."""
    return format_sse_event(data_str=to_json(value, inf_nan_mode="null").decode())


def json_response(value: dict[str, Any]) -> Response:
    """Return an object as a response."""
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")


async def client_left(receive: Receive) -> None:
    """Wait until the client of a request has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of events.

    Args:
        content: the events.
        leave: called when the client leaves; ``content`` ends then.
        close: called at the end, also before the first event.

    """

    def __init__(
        self, content: AsyncIterator[bytes], *, leave: Callable[[], None], close: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._leave, self._close = leave, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        left = asyncio.ensure_future(client_left(receive))  # takes half the time of starlette's task group
        left.add_done_callback(lambda _: self._leave())
        try:
            await self.stream_response(send)
        finally:
            left.cancel()
            self._close()
