"""The ingress of replicas on Ray: it relays requests, and repeats those whose replica ends too early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.events import END, event

_LOG = logging.getLogger(__name__)

LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""The errors of a request whose replica has ended."""
ATTEMPTS = 2
"""How often a request is sent: not more often, because a request may be the reason why a replica ends."""

_CONNECTION = ("type", "asgi", "http_version", "scheme", "client", "server", "root_path")
_SCOPE = {*_CONNECTION, "method", "path", "raw_path", "query_string", "headers"}
"""What replicas need of the scope of a request."""

Part = tuple[Message | None, bytes]
"""A part of a response: in the first one the message with status and headers, later None; and bytes."""


# ------------------------------------------------------------------------------------ in a replica


async def respond(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Part]:
    """Run an application on a request, and yield its response; what is ready together is one part.

    The first part has the beginning of the body. Closing the iterator cancels the application.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()  # a client that leaves cancels the application instead
        return requests.pop()

    task = asyncio.ensure_future(app(scope, receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    start: Message | None = None
    content, begun = bytearray(), False
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                start = message
            content += message.get("body", b"")
            if content and messages.empty():
                yield start, bytes(content)
                start, content, begun = None, bytearray(), True
        if start is not None:  # a response without a body
            yield start, b""
            begun = True
        if (error := task.exception()) is not None:
            if not begun:
                raise error
            _LOG.error("a request failed", exc_info=error)  # the response says so
    finally:
        task.cancel()


# ------------------------------------------------------------------------------------ in the ingress


class Relay:
    """Relays requests to replicas, whose deployment has the methods ``answer`` and ``metrics``.

    A request is sent once more, to another replica, if its replica ends before the response has begun. A
    stream that has begun ends with an error event. ``/metrics`` has the samples of all replicas.

    Args:
        replicas: the handle of their deployment.
        max_body_bytes: the limit of the replicas; not more than one byte beyond it is sent to them.

    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._limit = replicas, max_body_bytes + 1

    async def __call__(self, request: Request) -> Response:
        """Return the response of a replica."""
        body = await self._body(request)
        scope = {name: value for name, value in request.scope.items() if name in _SCOPE}
        for attempt in range(1, ATTEMPTS + 1):
            parts = self._replicas.options(method_name="answer", stream=True).remote(scope, body)
            try:
                start, content = await anext(parts)
            except LOST as error:
                _LOG.warning("attempt %d of %d: a replica ended: %s", attempt, ATTEMPTS, error)
                continue
            if start["status"] == 200 and scope["path"] == f"{scope.get('root_path', '')}/metrics":
                content = merged(await self._replicas.broadcast("metrics").results_async())
                return Response(content, media_type=dict(start["headers"])[b"content-type"].decode())
            return _Relayed(start, content, parts)
        failed = ApiError(503, _ENDED.format("try again later"), code="replica_ended", retry_after=5)
        return JSONResponse(failed.body(), status_code=failed.status, headers=failed.headers())

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) >= self._limit:
                break
        return bytes(body[: self._limit])


_ENDED = "the replica that served the request ended; {}"


class _Relayed(StreamingResponse):
    """A response whose parts come from a replica."""

    def __init__(self, start: Message, content: bytes, parts: Any) -> None:
        super().__init__(self._rest(content, parts), status_code=start["status"])
        self.raw_headers = list(start["headers"])
        self._parts = parts

    async def _rest(self, content: bytes, parts: Any) -> AsyncIterator[bytes]:
        yield content
        try:
            async for _, more in parts:
                yield more
        except LOST:
            _LOG.warning("a replica ended during a response", exc_info=True)
            if b"text/event-stream" not in dict(self.raw_headers).get(b"content-type", b""):
                raise
            error = ApiError(
                503,
                _ENDED.format("the text so far is incomplete; send the request again"),
                code="replica_ended",
            )
            yield event(error.body()) + END

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._parts.cancel()  # the client may have left


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        return iter(self._families)


def merged(found: Iterable[tuple[str, Iterable[Metric]]]) -> bytes:
    """Return the metrics of replicas in Prometheus' format, each sample with the label ``replica``."""
    families: dict[str, Metric] = {}
    for replica, metrics in found:
        for metric in metrics:
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
            )
            family.samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in metric.samples
            ]
    return generate_latest(_Families(families.values()))
