"""Many clients at once: no text is lost, mixed up, or changed by the others."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import pickle
import random
import resource
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import NewToken
from implicit_blocks.serving.engine import CHUNKS_PER_SECOND, Engine
from implicit_blocks.serving.inspections import Inspections
from implicit_blocks.serving.jobs import Batch, Events, GeneratedToken, Job, Order, Submit
from implicit_blocks.serving.language import Bytes
from implicit_blocks.serving.links import SocketSender, receive
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.worker import DELIVERY_SECONDS, Worker

PROMPTS = ["Hello", "one", "two words", "z", "Zürich", "a longer prompt of many bytes", "123", "{}"]


async def send(server: Any, body: dict[str, Any], *, leave_after: int | None = None) -> tuple[bytes, Any]:
    """Send a request and return the bytes of the answer; close the connection after some chunks of them.

    Returns the answer, and the times at which its events arrived.
    """
    reader, writer = await asyncio.open_connection(server.host, server.port)
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
    )
    began = time.monotonic()
    writer.write(head.encode() + sent)
    await writer.drain()
    received, times = b"", []
    while part := await reader.read(65536):
        received += part
        if b"data: " in part:
            times.append(time.monotonic() - began)
        if leave_after is not None and len(times) >= leave_after:
            break
    writer.close()
    return received, times


def text_of(received: bytes) -> str:
    """Return the text of a streamed answer, which must be complete."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], head
    content = b""
    while body:  # chunked transfer coding
        size, _, body = body.partition(b"\r\n")
        content += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("error" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


class Expected:
    """The texts of ``generate`` alone, as long as the longest; they begin with those of shorter requests."""

    def __init__(self, server: Any, longest: int) -> None:
        self.language = server.language
        self.tokens = {
            prompt: ib.generate(server.model, [list(prompt.encode())], max_new_tokens=longest)
            .tokens[0]
            .tolist()
            for prompt in PROMPTS
        }

    def text(self, prompt: str, count: int, stop: str | None) -> str:
        tokens = self.tokens[prompt][:count]
        if 256 in tokens:
            tokens = tokens[: tokens.index(256)]
        text: str = self.language.decode(tokens)
        return text if stop is None else text.partition(stop)[0]


async def load(
    server: Any, *, clients: int, requests: int, longest: int, seed: int
) -> dict[str, list[float]]:
    """Send requests of random lengths, stops and cancellations, and compare each text with ``generate``."""
    draws, expected = random.Random(seed), Expected(server, longest)
    work = [
        (draws.choice(PROMPTS), draws.randint(1, longest), draws.random(), draws.randint(1, 3))
        for _ in range(requests)
    ]
    first, between, checked, left = [], [], 0, 0

    async def client() -> None:
        nonlocal checked, left
        while work:
            prompt, count, what, chunks = work.pop()
            whole = expected.text(prompt, count, None)
            stop = whole[len(whole) // 2 :][:2] if what < 0.3 else None
            body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}
            leaves = chunks if what > 0.8 else None
            received, times = await send(server, body | ({"stop": stop} if stop else {}), leave_after=leaves)
            if leaves is not None:
                left += 1
                continue
            assert text_of(received) == expected.text(prompt, count, stop or None)
            checked += 1
            first.append(times[0])
            between.extend(b - a for a, b in itertools.pairwise(times))

    await asyncio.gather(*(client() for _ in range(clients)))
    assert checked + left == requests
    assert checked > requests // 2
    return {"first": first, "between": between}


def test_texts_of_many_streams_are_those_of_generate(model, start):
    server = start(model, max_batch_size=16, max_queue=64)
    asyncio.run(load(server, clients=32, requests=48, longest=10, seed=1))
    assert server.idle()


class Counter:
    """Replaces a decoder: it makes the tokens 0, 1, … of one text, one per step."""

    accepts_limits = False

    def __init__(self, steps_per_pause: int) -> None:
        self.texts: list[int | None] = [None]
        self.waiting: list[Any] = []
        self.made, self.steps_per_pause = 0, steps_per_pause

    @property
    def busy(self) -> bool:
        return self.texts != [None]

    def submit(self, request: Any) -> int:
        self.texts, self.left = [0], request.max_new_tokens
        return 0

    def step(self) -> list[NewToken]:
        if self.made % self.steps_per_pause == 0:
            time.sleep(0.001)
        self.made, self.left = self.made + 1, self.left - 1
        if not self.left:
            self.texts = [None]
        return [NewToken(0, self.made - 1, not self.left, torch.empty(0))]


def test_a_worker_sends_events_at_intervals_in_order_and_none_is_lost():
    batches, times, waited, ended = [], [], [], threading.Event()

    def send(batch: Batch, wait: bool) -> None:
        times.append(time.monotonic())
        waited.append(wait)
        batches.append(pickle.loads(pickle.dumps(batch)))
        if waited[-1] and any(new.last for one in batches for new in one.generated()):
            ended.set()  # the worker has waited until everything is sent, and has no work

    worker = Worker(None, lambda: Counter(20), Inspections(Bytes()), beat_seconds=60)  # type: ignore[arg-type, return-value]  # stand-ins
    worker.inbox.put(Submit([Order(number=0, name="a", prompt=[1], max_tokens=2000)]))
    worker.start(send)
    assert ended.wait(60)
    worker.stop(60)
    assert [new.token for batch in batches for new in batch.generated()] == list(range(2000))
    (last,) = [number for number, batch in enumerate(batches) if any(new.last for new in batch.generated())]
    regular = itertools.pairwise(times[:last])  # the end of a text is sent at once
    assert all(after - before >= 0.99 * DELIVERY_SECONDS for before, after in regular)
    assert 3 < len(batches) < 200


def batch_of(tokens: list[GeneratedToken]) -> Batch:
    """Return a batch with the tokens of one step."""
    numbers, times, *columns = zip(*tokens, strict=True)
    return Batch(tokens=[(times[0], numbers, *columns)])


def test_a_busy_receiver_does_not_stop_the_worker_and_loses_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send = SocketSender(ours)
        tokens = [GeneratedToken(0, 0.5, number, False) for number in range(20_000)]
        for first in range(0, len(tokens), 200):  # more than fits into the socket
            send(batch_of(tokens[first : first + 200]), False)
        found: list[GeneratedToken] = []

        def read() -> None:
            while len(found) < len(tokens):
                found.extend(receive(theirs).generated())

        reading = threading.Thread(target=read)
        reading.start()
        send(Batch(), True)
        reading.join(timeout=60)
        assert found == tokens
        theirs.close()
        for _ in range(3):
            send(Batch(), False)  # the receiver has gone


class Silent:
    """A link without a receiver."""

    async def start(self, receive: Any, lost: Any) -> None:
        """Do nothing."""

    async def stop(self, seconds: float) -> None:
        """Do nothing."""

    def send(self, message: Any) -> None:
        """Do nothing."""


def test_with_many_texts_tokens_are_delivered_together_and_ends_at_once():
    async def delivered() -> tuple[float, int, list[int]]:
        engine = Engine(Silent(), ServerOptions(max_batch_size=256, max_queue=0), Metrics(256))
        jobs = [
            Job(order=Order(number=n, name="a", prompt=[1], max_tokens=9), index=0, events=Events())
            for n in range(60)
        ]
        for job in jobs:
            engine.submit([job])
        engine._receive(batch_of([GeneratedToken(n, 0.0, 1, last=False) for n in range(60)]))
        _, first = await jobs[0].events.get()
        began = time.monotonic()
        for _ in range(3):
            engine._receive(batch_of([GeneratedToken(n, 0.0, 2, last=n == 59) for n in range(60)]))
        ended = [job.order.number for job in jobs if not job.events.empty()]
        _, later = await jobs[0].events.get()
        return time.monotonic() - began, len(first) + 10 * len(later), ended

    seconds, counts, ended = asyncio.run(delivered())
    assert counts == 31
    assert ended == [*range(1, 60)]  # which had the first tokens, and the text that ended
    assert 0.9 * 60 / CHUNKS_PER_SECOND <= seconds <= 0.5


@pytest.mark.slow
def test_two_hundred_clients_lose_and_mix_up_nothing(model, start_two, record_property):
    server = start_two(model, max_batch_size=64, max_queue=256)
    found = asyncio.run(load(server, clients=200, requests=2000, longest=24, seed=2))
    for name, seconds in found.items():
        cuts = statistics.quantiles(seconds, n=20)
        record_property(f"{name}_p50_p95_seconds", (round(cuts[9], 4), round(cuts[18], 4)))
        print(f"{name}: p50 {cuts[9] * 1e3:.0f} ms, p95 {cuts[18] * 1e3:.0f} ms")
    assert server.idle()


@pytest.mark.slow
def test_memory_of_both_processes_is_flat_over_ten_thousand_requests(model, start_two):
    server = start_two(model, max_batch_size=64, max_queue=512)

    async def many(count: int) -> None:
        async def client() -> None:
            for _ in range(count // 50):
                body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "temperature": 0, "stream": True}
                text_of((await send(server, body))[0])

        await asyncio.gather(*(client() for _ in range(50)))

    def resident() -> list[int]:
        gc.collect()
        files = [Path(f"/proc/{pid}/statm") for pid in ("self", server.process.pid)]
        return [int(file.read_text().split()[1]) * resource.getpagesize() for file in files]

    asyncio.run(many(2000))
    before = resident()
    asyncio.run(many(8000))
    grown = [after - first for first, after in zip(before, resident(), strict=True)]
    print(
        f"resident memory: {[one >> 20 for one in before]} MiB, grown by {[one >> 10 for one in grown]} KiB"
    )
    assert max(grown) < 20 << 20
