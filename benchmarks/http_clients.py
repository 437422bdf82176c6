"""Streaming clients of a server, in a process of their own: they read an order and print what they measured.

Each client keeps its connection, as OpenAI's clients do. ``serving.py`` starts this program. It imports
nothing but the standard library, so that it starts fast.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any


async def measure(
    port: int, clients: int, texts: list[tuple[list[int], int]], body: dict[str, Any]
) -> dict[str, float | list[float]]:
    """Send a request for each text, and measure tokens per second and the seconds between the chunks.

    Args:
        port: that of the server, at 127.0.0.1.
        clients: number of requests at a time.
        texts: the prompts, as tokens, each with the number of new tokens.
        body: the other fields of the requests.

    """
    first: list[float] = []
    between: list[float] = []
    left = iter(texts)

    async def send(
        prompt: list[int], tokens: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sent = json.dumps({**body, "prompt": prompt, "max_tokens": tokens, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        )
        began = last = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        seen, tail = False, b""
        while not tail.endswith(b"\r\n0\r\n\r\n") and (part := await reader.read(1 << 16)):
            tail = (tail + part)[-64:]
            if b"data: {" in part:
                now = time.perf_counter()
                (between if seen else first).append(now - (last if seen else began))
                seen, last = True, now
        assert seen and b"data: [DONE]" in tail, "a request was refused or not finished"  # noqa: PT018  # one fact

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for prompt, tokens in left:
            await send(prompt, tokens, reader, writer)
        writer.close()

    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]
    began = time.perf_counter()
    await asyncio.gather(*(client(*connection) for connection in connections))
    seconds = time.perf_counter() - began
    found: dict[str, float | list[float]] = {
        "tokens_per_second": sum(tokens for _, tokens in texts) / seconds
    }
    for name, values in (("first_token", first), ("between_tokens", between)):
        cuts = statistics.quantiles(values, n=20) if len(values) > 1 else values * 19 or [0.0] * 19
        found[f"{name}_p50"], found[f"{name}_p95"] = cuts[9], cuts[18]
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(**json.load(sys.stdin)))))
