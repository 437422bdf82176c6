"""Servers of tiny models in this process, each on a free port, and raw requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from implicit_blocks.serving.engine import Engine
from implicit_blocks.serving.hosting import Host
from implicit_blocks.serving.language import Bytes, Language
from implicit_blocks.serving.listening import listen, make_server
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.processes import HttpProcess
from implicit_blocks.serving.served import ServedModel
from implicit_blocks.serving.server import application
from implicit_blocks.serving.worker import Worker


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """Return the chunks of a stream, which must be complete."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass
class Address:
    """The address of a running server, and its model."""

    host: str
    port: int
    model: Any
    language: Language
    worker: Worker
    name: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, sent, {"Content-Type": "application/json", **headers})

    def complete(self, prompt: Any, **fields: Any) -> Reply:
        """Request a completion, greedy by default."""
        given = {"model": self.name, "prompt": prompt, "temperature": 0}
        return self.post("/v1/completions", given | fields)

    def is_idle(self) -> bool:
        """Whether no text is left in the decoder."""
        return all(text is None for text in self.worker.decoder.texts)

    def idle(self) -> bool:
        """Wait until the decoder has no text; return whether this took less than the time limit."""
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            if self.is_idle():
                return True
            time.sleep(0.01)
        return False

    def expected(self, prompt: list[int], count: int, **options: Any) -> str:
        """Return the text that ``generate`` alone continues a prompt with."""
        stops = [token for token in self.language.stop_token_ids if token < self.model.spec.vocab_size]
        made = ib.generate(self.model, [prompt], max_new_tokens=count, stop_token_ids=stops, **options)
        return self.language.decode(made.tokens[0, : int(made.lengths[0])].tolist())


@dataclass
class Running(Address):
    """A server in this process."""

    served: ServedModel
    server: Any
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.served.engine

    def is_idle(self) -> bool:
        return super().is_idle() and not self.engine.pending


Start = Callable[..., Running]


@contextlib.contextmanager
def running(
    model: Any,
    language: Language | None = None,
    *,
    name: str = "tiny",
    make_decoder: Callable[[], Any] | None = None,
    compare: dict[str, Any] | None = None,
    problem: Any = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve a model; ``compare`` has others by name."""
    language = language if language is not None else Bytes()
    given = ServerOptions(**{"port": 0, "max_seq_len": 96, "max_batch_size": 8, **options})
    hosts = [
        Host(one, model, language, given, make_decoder=make_decoder, problem=problem)
        for one, model in {name: model, **(compare or {})}.items()
    ]
    app = application(hosts)
    listening = listen(given)
    server = make_server(app, given)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        host, port = listening.getsockname()[:2]
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield Running(host, port, model, language, hosts[0].worker, name, app.state.served, server, thread)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listening.close()
        assert not thread.is_alive()


@dataclass
class InTwoProcesses(Address):
    """A server whose HTTP side is another process."""

    process: HttpProcess


@contextlib.contextmanager
def running_in_two_processes(
    model: Any,
    *,
    make_decoder: Callable[[], Any] | None = None,
    compare: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[InTwoProcesses]:
    """Serve a model of bytes by two processes; ``compare`` has others by name."""
    given = ServerOptions(**{"port": 0, "max_seq_len": 96, "max_batch_size": 8, **options})
    others = [Host(name, other, Bytes(), given) for name, other in (compare or {}).items()]
    host = Host("tiny", model, Bytes(), given, make_decoder=make_decoder)
    listening = listen(given)
    address, port = listening.getsockname()[:2]
    with HttpProcess([host, *others], listening) as process:
        process.wait_until_ready()
        yield InTwoProcesses(address, port, model, Bytes(), host.worker, "tiny", process)


async def ask_in_process(app: Any, path: str, body: bytes, *, client: str = "127.0.0.1") -> tuple[int, bytes]:
    """Send a request to an application in this process, without a connection."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
    }
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "client": (client, 1)}
    scope |= {
        "server": ("127.0.0.1", 8000),
        "root_path": "",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, received = 0, bytearray()

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        received.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, bytes(received)


def byte_model(kind: str = "mamba2", **changes: Any) -> Any:
    """Return a tiny model of bytes whose greedy texts have several different characters."""
    torch.manual_seed(3)
    mixers: dict[str, dict[str, Any]] = {
        "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
        "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
    }
    stopping = ib.StoppingOverrides(tolerance=1e-4, max_iterations=100)
    fields = {"vocab_size": 257, "d_model": 16, "n_layers": 1, **mixers[kind]}
    if changes.pop("explicit", False):
        model = ib.build(ib.ExplicitLMSpec(**(fields | changes)))
    else:
        at_evaluation = ib.AtEvaluation(stopping=stopping)
        model = ib.build(ib.ImplicitLMSpec(**(fields | {"at_evaluation": at_evaluation} | changes)))
    with torch.no_grad():
        model.embedding.weight.mul_(20)
        for block in model.backbone.blocks():
            if hasattr(block.mixer.in_proj, "parametrizations"):
                block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
                block.mixer.out_proj.parametrizations.weight.original0.mul_(40.0)
    return model.eval()


class Gate:
    """A decoder's ``step`` that can be paused, made to fail at certain calls, or slowed down."""

    def __init__(self, model: Any, *, slots: int = 2, seconds: float = 0.0) -> None:
        self.model, self.slots, self.seconds = model, slots, seconds
        self.open = threading.Event()
        self.open.set()
        self.fail_at: set[int] = set()
        self.calls = self.made = 0
        self.cannot_restart = False

    def __call__(self) -> ContinuousDecoder:
        self.made += 1
        if self.made > 1 and self.cannot_restart:
            raise RuntimeError("no memory left at /secret/path")
        decoder = ContinuousDecoder(self.model, max_batch_size=self.slots, max_seq_len=96)
        step = decoder.step

        def held() -> Any:
            assert self.open.wait(timeout=60)
            self.calls += 1
            time.sleep(self.seconds)
            if self.calls in self.fail_at:
                raise RuntimeError("the device is gone: /secret/path")
            return step()

        decoder.step = held  # type: ignore[method-assign]  # of this object alone
        return decoder


@pytest.fixture
def gate(model: Any) -> Gate:
    """Return a decoder that can be paused."""
    return Gate(model)


@pytest.fixture
def slow(model: Any) -> Gate:
    """Return a decoder that can be paused, with a delay of 2 ms per step."""
    return Gate(model, slots=4, seconds=0.002)


@pytest.fixture(scope="session")
def model() -> Any:
    return byte_model()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return byte_model


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """Return the context manager of a running server, for fixtures that outlive a test."""
    return running


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    """Return a server that the tests of a module share."""
    with running(model) as found:
        yield found


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """Return a coroutine function that sends a request without a connection."""
    return ask_in_process


@pytest.fixture
def start_two() -> Iterator[Callable[..., InTwoProcesses]]:
    """Return a function that starts a server of two processes, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(running_in_two_processes(*args, **options))


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a server, which ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(running(*args, **options))
