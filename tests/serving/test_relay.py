"""The ingress of replicas, without a cluster: which requests are repeated, and how metrics are merged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

pytest.importorskip("ray", reason="the extra ray is not installed")

from ray.exceptions import ActorDiedError

from implicit_blocks.serving.jobs import Events, GeneratedToken, Job, Order
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.relay import Relay, merged, respond

JSON = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM = {**JSON, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}


class Replicas:
    """A handle whose calls yield the given parts, and raise the errors among them."""

    def __init__(self, *calls: list[Any]) -> None:
        self.calls, self.sent, self.cancelled = list(calls), [], 0

    def options(self, **options: Any) -> Replicas:
        assert options == {"method_name": "answer", "stream": True}
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> Any:
        self.sent.append((scope["path"], body))
        return _Parts(self, self.calls.pop(0))

    def broadcast(self, name: str) -> Any:
        async def found() -> list[Any]:
            return [
                (replica, list(counted(tokens).registry.collect()))
                for replica, tokens in (("a", 2), ("b", 3))
            ]

        assert name == "metrics"
        return SimpleNamespace(results_async=found)


class _Parts:
    def __init__(self, replicas: Replicas, parts: list[Any]) -> None:
        self.replicas, self.parts = replicas, parts

    def __aiter__(self) -> _Parts:
        return self

    async def __anext__(self) -> Any:
        if not self.parts:
            raise StopAsyncIteration
        if isinstance(part := self.parts.pop(0), Exception):
            raise part
        return part

    def cancel(self) -> None:
        self.replicas.cancelled += 1


def counted(tokens: int) -> Metrics:
    metrics = Metrics(slots=4)
    job = Job(order=Order(number=0, name="x", prompt=[1], max_tokens=9), index=0, events=Events())
    for _ in range(tokens):
        metrics.token(GeneratedToken(0, 0.0, 1, last=False, iterations=5), job)
    metrics.count(tokens, 0.0)
    return metrics


def send(replicas: Replicas, *, path: str = "/v1/completions", body: bytes = b"{}") -> tuple[int, bytes]:
    """Send a request through the ingress; return the status and the body."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    messages: list[Any] = []

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def take(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        request = Request({**scope, "asgi": {"spec_version": "2.4"}}, receive)
        response = await Relay(replicas, max_body_bytes=100)(request)
        await response(request.scope, receive, take)

    asyncio.run(run())
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)


def test_a_request_whose_replica_ends_before_its_response_is_repeated():
    for start in (JSON, STREAM):
        replicas = Replicas([ActorDiedError()], [(start, b"one"), (None, b" two")])
        assert send(replicas, body=b"{1}") == (200, b"one two")
        assert replicas.sent == [("/v1/completions", b"{1}")] * 2


def test_a_request_is_repeated_once():
    replicas = Replicas([ActorDiedError()], [ActorDiedError()], [(JSON, b"never")])
    status, body = send(replicas)
    assert status == 503
    assert b"replica_ended" in body
    assert len(replicas.sent) == 2


def test_a_stream_that_has_begun_ends_with_an_error_event():
    replicas = Replicas([(STREAM, b"data: 1\n\n"), ActorDiedError()], [(STREAM, b"never")])
    status, body = send(replicas)
    assert status == 200
    first, error, end, rest = body.decode().split("\n\n")
    assert (first, end, rest) == ("data: 1", "data: [DONE]", "")
    assert '"code":"replica_ended"' in error
    assert len(replicas.sent) == 1


def test_the_replica_s_work_is_cancelled_when_the_response_ends():
    replicas = Replicas([(STREAM, b"data: 1\n\n")])
    send(replicas)
    assert replicas.cancelled == 1


def test_a_body_over_the_limit_is_cut_where_the_replica_refuses_it():
    replicas = Replicas([({**JSON, "status": 413}, b"too large")])
    assert send(replicas, body=b"x" * 1000) == (413, b"too large")
    assert len(replicas.sent[0][1]) == 101


def test_metrics_have_the_samples_of_every_replica():
    status, body = send(Replicas([(STREAM, b"of one replica")]), path="/metrics")
    assert status == 200
    lines = body.decode().splitlines()
    assert 'implicit_blocks_tokens_total{replica="a"} 2.0' in lines
    assert 'implicit_blocks_tokens_total{replica="b"} 3.0' in lines
    assert 'implicit_blocks_iterations_bucket{le="8.0",replica="b"} 3.0' in lines
    assert len([line for line in lines if line.startswith("# TYPE implicit_blocks_tokens_total ")]) == 1


def test_metrics_are_refused_as_the_replica_refuses_them():
    assert send(Replicas([({**JSON, "status": 401}, b"no key")]), path="/metrics") == (401, b"no key")


def test_replicas_without_metrics_give_no_sample():
    assert merged([]) == b""


# ------------------------------------------------------------------------------------ in a replica


def parts_of(app: Any, *, most: int = 99) -> list[Any]:
    async def run() -> list[Any]:
        parts = respond(app, {"type": "http"}, b"body")
        found = []
        async for part in parts:
            found.append(part)
            if len(found) == most:
                break
        await parts.aclose()
        await asyncio.sleep(0)
        return found

    return asyncio.run(run())


def test_parts_that_are_ready_together_are_joined():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"body"
        await send(STREAM)
        for part in (b"a", b"b"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"c", "more_body": True})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    assert parts_of(app) == [(STREAM, b"ab"), (None, b"c")]


def test_a_response_without_a_body_has_one_part():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(JSON)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    assert parts_of(app) == [(JSON, b"")]


def test_the_application_is_cancelled_with_its_response():
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(STREAM)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        try:
            await receive()
            await receive()  # which waits for ever
        except asyncio.CancelledError:
            ended.append(True)
            raise

    assert parts_of(app, most=1) == [(STREAM, b"a")]
    assert ended == [True]


def test_an_error_before_the_response_is_raised():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        parts_of(app)
