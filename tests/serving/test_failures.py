"""Full queues, clients that leave, time limits, a decoder that is stuck or fails, and the end of a server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

LONG = 80


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as found:
        yield found


def wait_for(condition: Any) -> bool:
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    return bool(condition())


def open_stream(server: Any, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": LONG, "temperature": 0, "stream": True} | fields
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def leave(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
    answer.close()
    connection.close()


def test_a_full_queue_answers_429_with_the_time_to_wait(model, start, gate, pool):
    server = start(model, make_decoder=gate, max_batch_size=2, max_queue=3)
    gate.open.clear()
    futures = [pool.submit(server.complete, "Hello", max_tokens=3) for _ in range(5)]
    assert wait_for(lambda: server.engine.pending == 5)
    refused = server.complete("Hello", max_tokens=3)
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.error["code"] == "queue_full"
    gate.open.set()
    assert [future.result().status for future in futures] == [200] * 5
    assert server.complete("Hello", max_tokens=3).status == 200


def test_more_texts_than_the_queue_can_take_are_a_bad_request(model, start):
    server = start(model, max_batch_size=2, max_queue=3)
    assert server.complete(["a"] * 6, max_tokens=2).status == 400
    assert server.complete(["a"] * 5, max_tokens=2).status == 200


def test_a_stream_whose_client_leaves_frees_its_slot(model, start, gate):
    server = start(model, make_decoder=gate, max_batch_size=2)
    connection, answer = open_stream(server)
    answer.readline()
    leave(connection, answer)
    assert server.idle()
    assert gate.calls < LONG * 12
    assert b"implicit_blocks_cancelled_total 1.0" in server.request("GET", "/metrics").body


def test_a_request_whose_client_leaves_before_its_answer_is_ended(model, start, gate):
    server = start(model, make_decoder=gate, max_batch_size=2)
    gate.open.clear()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": LONG}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert wait_for(lambda: server.engine.pending == 1)
    connection.close()
    gate.open.set()
    assert server.idle()
    assert wait_for(lambda: b'status="499"' in server.request("GET", "/metrics").body)


def test_the_others_of_a_client_that_leaves_keep_their_texts(model, start, pool):
    server = start(model, max_batch_size=4)
    expected = server.expected(list(b"abc"), 20)
    futures = [pool.submit(server.complete, "abc", max_tokens=20) for _ in range(3)]
    for _ in range(4):
        connection, answer = open_stream(server)
        answer.readline()
        leave(connection, answer)
    assert [future.result().json["choices"][0]["text"] for future in futures] == [expected] * 3


def test_a_request_that_takes_too_long_is_ended(model, start, gate):
    server = start(model, make_decoder=gate, max_batch_size=2, timeout=0.3)
    gate.open.clear()
    reply = server.complete("Hello", max_tokens=3)
    assert reply.status == 504
    assert "0.3 seconds" in reply.error["message"]
    streamed = server.complete("Hello", max_tokens=3, stream=True)
    assert streamed.events[-1]["error"]["code"] == "timeout"
    gate.open.set()
    assert server.idle()


def test_a_stuck_decoder_answers_503_until_it_continues(model, start, gate, pool):
    server = start(model, make_decoder=gate, max_batch_size=2, stall_seconds=0.2)
    gate.open.clear()
    waiting = pool.submit(server.complete, "Hello", max_tokens=3)
    assert wait_for(lambda: server.request("GET", "/health").status == 503)
    assert "no progress" in server.request("GET", "/health").error["message"]
    refused = server.complete("Hello", max_tokens=3)
    assert refused.status == 503
    assert "retry-after" in refused.headers
    gate.open.set()
    assert waiting.result().status == 200
    assert wait_for(lambda: server.request("GET", "/health").status == 200)


def test_a_failure_ends_the_requests_in_the_slots_by_name_and_the_waiting_ones_continue(
    model, start, gate, pool
):
    server = start(model, make_decoder=gate, max_batch_size=2, max_queue=8)
    gate.open.clear()
    gate.fail_at = {3}
    futures = [pool.submit(server.complete, "Hello", max_tokens=4) for _ in range(5)]
    assert wait_for(lambda: server.engine.pending == 5)
    gate.open.set()
    replies = [future.result() for future in futures]
    failed = [reply for reply in replies if reply.status == 500]
    assert len(failed) == 2
    for reply in failed:
        assert "cmpl-" in reply.error["message"]
        assert "RuntimeError" in reply.error["message"]
        assert "/secret/path" not in reply.error["message"]
    expected = server.expected(list(b"Hello"), 4)
    texts = [reply.json["choices"][0]["text"] for reply in replies if reply.status == 200]
    assert texts == [expected] * 3
    assert gate.made == 2
    assert server.request("GET", "/health").status == 200


def test_a_failure_ends_a_stream_with_an_error(model, start, gate):
    server = start(model, make_decoder=gate, max_batch_size=2)
    gate.fail_at = {20}
    reply = server.complete("Hello", max_tokens=LONG, stream=True)
    assert reply.events[-1]["error"]["code"] == "decoder_failure"
    assert server.complete("Hello", max_tokens=2).status == 200


def test_a_decoder_that_cannot_be_restarted_leaves_a_server_that_answers_503(model, start, gate):
    server = start(model, make_decoder=gate, max_batch_size=2)
    gate.fail_at, gate.cannot_restart = {2}, True
    assert server.complete("Hello", max_tokens=3).status == 500
    for reply in (server.complete("Hello", max_tokens=3), server.request("GET", "/health")):
        assert reply.status == 503
        assert "could not be restarted" in reply.error["message"]
        assert "/secret/path" not in reply.error["message"]


def test_a_failure_while_scoring_ends_its_request_alone(model, start, monkeypatch):
    server = start(model)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patched:
        patched.setattr("implicit_blocks.serving.scores.score_prompts", broken)
        assert server.complete("Hello", max_tokens=1, echo=True, logprobs=1).status == 500
    assert server.complete("Hello", max_tokens=1, echo=True, logprobs=1).status == 200


def test_a_server_that_is_stopped_finishes_what_runs(model, start, pool):
    server = start(model, max_batch_size=4)
    expected = server.expected(list(b"Hello"), LONG)
    whole = pool.submit(server.complete, "Hello", max_tokens=LONG)
    connection, answer = open_stream(server)
    answer.readline()
    server.server.should_exit = True
    assert whole.result().json["choices"][0]["text"] == expected
    assert answer.read().endswith(b"data: [DONE]\n\n")
    leave(connection, answer)
    server.thread.join(timeout=20)
    assert not server.thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        server.request("GET", "/health")


def test_a_server_that_is_stopped_ends_what_takes_too_long(model, start, gate, pool):
    server = start(model, make_decoder=gate, max_batch_size=2, shutdown_seconds=1)
    gate.open.clear()
    future = pool.submit(server.complete, "Hello", max_tokens=3)
    assert wait_for(lambda: server.engine.pending == 1)
    server.server.should_exit = True
    time.sleep(0.1)
    began = time.monotonic()
    with contextlib.suppress(OSError, http.client.HTTPException):
        future.result(timeout=30)
    gate.open.set()
    server.thread.join(timeout=20)
    assert not server.thread.is_alive()
    assert time.monotonic() - began < 15


def test_cancelled_texts_that_waited_leave_the_queue(model, start, gate, pool):
    server = start(model, make_decoder=gate, max_batch_size=2, max_queue=20)
    gate.open.clear()

    async def leave_all() -> None:
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": LONG}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        writers = []
        for _ in range(10):
            _, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(head + body)
            await writer.drain()
            writers.append(writer)
        while server.engine.pending < 10:
            await asyncio.sleep(0.01)
        for writer in writers:
            writer.close()

    asyncio.run(leave_all())
    gate.open.set()
    assert server.idle()
    assert b"implicit_blocks_queue 0.0" in server.request("GET", "/metrics").body
