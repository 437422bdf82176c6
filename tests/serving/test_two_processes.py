"""A server in two processes: requests, cancellation, signals, and either process ending."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import implicit_blocks as ib
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import Batch, GeneratedToken, LogProbability, PromptRead
from implicit_blocks.serving.language import Bytes
from implicit_blocks.serving.options import KEY_VARIABLE

LONG = 80


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as found:
        yield found


def open_stream(server: Any, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Begin a stream and return its connection and response."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    body = {"model": server.name, "prompt": "Hello", "max_tokens": LONG, "temperature": 0, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body | fields), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    return connection, answer


def metric(server: Any, name: str) -> float:
    """Return a sample of the metrics."""
    text = server.request("GET", "/metrics").body.decode()
    (found,) = re.findall(rf"^implicit_blocks_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found)


def wait_for(condition: Any, seconds: float = 20) -> bool:
    """Wait for a condition; return whether it became true within the time limit."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def text_of(received: bytes) -> str:
    """Return the text of a whole stream without an error."""
    *lines, end = [line.removeprefix("data: ") for line in received.decode().split("\n\n") if line]
    assert end == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_texts_metrics_and_inspections_are_those_of_one_process(model, start_two, pool):
    server = start_two(model, max_batch_size=4)
    expected = server.expected(list(b"Hello"), 12)
    futures = [pool.submit(server.complete, "Hello", max_tokens=12, stream=bool(n % 2)) for n in range(8)]
    for number, future in enumerate(futures):
        reply = future.result()
        chunks = reply.events if number % 2 else [reply.json]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    scored = server.complete("abc", max_tokens=2, echo=True, logprobs=2, return_iterations=True).json
    choice = scored["choices"][0]
    assert choice["text"] == "abc" + server.expected(list(b"abc"), 2)
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert [report["iterations"] > 0 for report in choice["token_reports"]] == [True] * 2
    sampled = {
        "max_tokens": 6,
        "temperature": 1.0,
        "seed": 5,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": 2},
    }
    assert server.complete("x", **sampled).json["choices"] == server.complete("x", **sampled).json["choices"]
    inspected = server.post("/v1/inspect", {"model": "tiny", "prompt": "Hello", "continuation": [65, 66]})
    assert [token["token"] for token in inspected.json["tokens"]] == list("HelloAB")
    assert server.request("GET", "/v1/models").json["data"][0]["accepts_limits"] is True
    assert metric(server, "tokens_total") == metric(server, "iterations_count") == 8 * 12 + 2 + 12
    assert metric(server, "prompt_tokens_total") == 8 * 5 + 3 + 2
    assert metric(server, "first_token_seconds_count") == 11
    assert (metric(server, "queue"), metric(server, "busy_slots")) == (0, 0)


def test_two_models_have_a_worker_each(model, make_model, start_two, pool):
    explicit = make_model(explicit=True)
    server = start_two(model, compare={"twin": explicit})
    names = ["tiny", "twin"] * 3
    futures = [pool.submit(server.complete, "Hello", max_tokens=9, model=name) for name in names]
    texts = [future.result().json["choices"][0]["text"] for future in futures]
    made = ib.generate(explicit, [list(b"Hello")], max_new_tokens=9, stop_token_ids=[256])
    twin = Bytes().decode(made.tokens[0, : int(made.lengths[0])].tolist())
    assert texts == [server.expected(list(b"Hello"), 9), twin] * 3
    cards = server.request("GET", "/v1/models").json["data"]
    assert [card["kind"] for card in cards] == ["implicit", "explicit"]


def test_the_http_process_imports_no_torch():
    code = "import sys, implicit_blocks.serving.http_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_batches_and_errors_arrive_as_they_were_sent():
    score = LogProbability(3, -0.5, ((3, -0.5), (4, -1.0)))
    batch = Batch(
        prompts=[(1, PromptRead(5, [score]))],
        tokens=[
            (0.5, [1, 2], (3, 4), (False, True), (7, None), (0.25, None), (True, None), [score, None]),
            (0.75, [1], (5,), (True,), (8,), (0.5,), (False,), [None]),
        ],
        reports=[(3, {"token": "a"}), (4, None)],
        busy_slots=2,
        failures=1,
    )
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert list(batch.generated()) == [
        GeneratedToken(1, 0.5, 3, False, 7, 0.25, True, score),
        GeneratedToken(2, 0.5, 4, True),
        GeneratedToken(1, 0.75, 5, True, 8, 0.5, False),
    ]
    assert pickle.loads(pickle.dumps(Batch())) == Batch()
    error = pickle.loads(pickle.dumps(ApiError(429, "full", param="n", code="queue_full", retry_after=3)))
    assert (error.status, str(error), error.body()["error"]["param"]) == (429, "full", "n")
    assert error.headers() == {"Retry-After": "3"}


def test_bad_requests_are_refused_with_their_reason(model, start_two):
    server = start_two(model, api_key="secret")
    assert server.complete("Hello").status == 401
    key = {"Authorization": "Bearer secret"}
    for body, status in (
        ({"model": "other", "prompt": "a"}, 404),
        ({"model": "tiny", "prompt": [999]}, 400),
        ({"model": "tiny", "prompt": "a", "max_tokens": 10**6}, 400),
        (b"\xff{", 400),
    ):
        assert server.post("/v1/completions", body, **key).status == status


def test_a_client_that_leaves_frees_its_slot_in_the_other_process(model, start_two, slow):
    server = start_two(model, make_decoder=slow, max_batch_size=2)
    connection, answer = open_stream(server)
    answer.readline()
    assert not server.is_idle()
    answer.close()
    connection.close()
    assert server.idle()
    assert slow.calls < LONG * 12
    assert wait_for(lambda: metric(server, "cancelled_total") == 1)


def test_a_full_queue_a_deadline_and_a_stuck_decoder_are_reported(model, start_two, slow, pool):
    options = {"max_batch_size": 1, "max_queue": 1, "timeout": 2.0, "stall_seconds": 0.4}
    server = start_two(model, make_decoder=slow, **options)
    slow.open.clear()
    waiting = [pool.submit(server.complete, "Hello", max_tokens=3) for _ in range(2)]
    assert wait_for(lambda: metric(server, "queue") == 2)
    refused = server.complete("Hello", max_tokens=3)
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert wait_for(lambda: server.request("GET", "/health").status == 503)
    assert "no progress" in server.request("GET", "/health").error["message"]
    assert [future.result().status for future in waiting] == [504] * 2
    slow.open.set()
    assert server.idle()
    assert wait_for(lambda: metric(server, "cancelled_total") == 2)
    assert server.request("GET", "/health").status == 200
    assert server.complete("Hello", max_tokens=3).status == 200


def test_a_failed_decoder_ends_its_requests_by_name_and_the_server_goes_on(model, start_two, slow):
    server = start_two(model, make_decoder=slow, max_batch_size=2)
    slow.fail_at = {4}
    reply = server.complete("Hello", max_tokens=LONG)
    assert reply.status == 500
    assert "cmpl-" in reply.error["message"]
    assert server.complete("Hello", max_tokens=3).status == 200
    assert metric(server, "decoder_failures_total") == 1


def test_running_requests_finish_after_sigterm_and_new_ones_are_refused(model, start_two, slow, pool):
    server = start_two(model, make_decoder=slow, max_batch_size=4)
    expected = server.expected(list(b"Hello"), LONG)
    whole = pool.submit(server.complete, "Hello", max_tokens=LONG)
    connection, answer = open_stream(server)
    first = answer.readline()
    server.process.stop()
    assert wait_for(lambda: refused(server), 5)
    assert text_of(first + answer.read()) == whole.result().json["choices"][0]["text"] == expected
    connection.close()
    server.process.wait()


def refused(server: Any) -> bool:
    try:
        server.request("GET", "/health")
    except OSError:
        return True
    return False


def test_a_stop_at_once_does_not_wait_for_running_requests(model, start_two, slow):
    server = start_two(model, make_decoder=slow, max_batch_size=2, shutdown_seconds=60)
    slow.open.clear()
    with contextlib.closing(http.client.HTTPConnection(server.host, server.port)) as opened:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": LONG}
        opened.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert wait_for(lambda: metric(server, "queue") == 1)
        began = time.monotonic()
        server.process.stop()
        time.sleep(0.3)
        server.process.stop(at_once=True)
        server.process.wait()
        assert time.monotonic() - began < 10
    slow.open.set()


# ------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an exported folder of the tiny model."""
    pytest.importorskip("transformers")
    from implicit_blocks.hf import from_library

    path = tmp_path_factory.mktemp("two") / "tiny"
    from_library(model).save_pretrained(path)
    return path


@dataclass
class Command:
    """The command ``serve`` in a process of its own, and a connection to it."""

    pid: int
    connection: http.client.HTTPConnection
    log: Path
    python: Any

    def wait(self, timeout: float = 60) -> int:
        """Return the exit code."""
        code: int = self.python.wait(self.pid, timeout=timeout)
        return code


@pytest.fixture
def command(folder: Path, tmp_path: Path, python: Any) -> Iterator[Command]:
    """Run the command ``serve``."""
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    arguments = ["-m", "implicit_blocks", "serve", str(folder), "--tokenizer", "bytes"]
    arguments += ["--port", "0", "--device", "cpu"]
    pid = python.start(
        arguments, cwd=tmp_path, outputs=tmp_path, environment=environment | {"OMP_NUM_THREADS": "1"}
    )
    log = tmp_path / "stderr"
    try:
        assert wait_for(lambda: log.is_file() and b"http://" in log.read_bytes(), 120)
        found = re.search(r"http://([\d.]+):(\d+)", log.read_text())
        assert found is not None, log.read_text()
        connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=60)
        with contextlib.closing(connection):
            yield Command(pid, connection, log, python)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def child_of(pid: int) -> int:
    """Return the HTTP process of a server."""
    (child,) = [
        int(number)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for number in (task / "children").read_text().split()
    ]
    return child


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def begin(connection: http.client.HTTPConnection, count: int = LONG) -> http.client.HTTPResponse:
    """Begin a stream and wait for its first event."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": count, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return answer


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_running_texts_finish(command, sent):
    answer, child = begin(command.connection, 80), child_of(command.pid)
    os.kill(command.pid, sent)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    assert command.wait() == 0
    assert wait_for(lambda: not is_running(child))
    assert "Traceback" not in command.log.read_text()


def test_the_http_process_ends_with_the_process_of_the_model(command):
    answer, child = begin(command.connection, 1500), child_of(command.pid)
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    received = answer.read()
    assert received.endswith(b"data: [DONE]\n\n")
    assert b"the process of the model has ended" in received
    assert wait_for(lambda: not is_running(child))


def test_the_server_ends_with_its_http_process_and_says_so(command):
    os.kill(child_of(command.pid), signal.SIGKILL)
    assert command.wait() == 2
    assert "exit code -9" in command.log.read_text()
