"""Tokens per second through HTTP against those of the decoder driven directly, and the latencies of streams.

    python benchmarks/serving.py [SOURCE] [--clients 1 16 64] [--tokens 64] [--repeats 3]

Both generate the same texts with as many slots as clients. The clients run in a process of their own, so that
they share the cores with the server, but not its interpreter. Without SOURCE the model is a new one of the
size of ``word_problem_s3``'s. Repeats alternate between the two; the table has their medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.serving.language import Numbers
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.server import application, listen, make_server
from implicit_blocks.specs import load_spec

PROMPT = 16  # tokens


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, PROMPT), generator=generator).tolist()


def direct(model: Any, clients: int, tokens: int, texts: list[list[int]]) -> float:
    """Return the tokens per second of the decoder."""
    decoder = ContinuousDecoder(
        model, max_batch_size=clients, max_seq_len=PROMPT + tokens, limits_per_request=True
    )
    for text in texts:
        decoder.submit(Request(prompt=text, max_new_tokens=tokens))
    began = time.perf_counter()
    made = sum(1 for _ in decoder.run())
    return made / (time.perf_counter() - began)


@contextlib.contextmanager
def served(model: Any, clients: int, tokens: int) -> Iterator[int]:
    """Run a server, and return its port."""
    options = ServerOptions(
        port=0, max_batch_size=clients, max_seq_len=PROMPT + tokens, max_queue=4 * clients
    )
    with listen(options) as listening:
        server = make_server(application(model, Numbers(), options, name="model"), options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def through_http(model: Any, clients: int, tokens: int, texts: list[list[int]]) -> dict[str, float]:
    """Return tokens per second, and seconds to the first token and between tokens, of streams."""
    with served(model, clients, tokens) as port:
        order = json.dumps({"port": port, "clients": clients, "tokens": tokens, "texts": texts})
        done = subprocess.run(
            [sys.executable, __file__, "--as-clients"],
            input=order,
            capture_output=True,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout)
    return found


async def as_clients(port: int, clients: int, tokens: int, texts: list[list[int]]) -> dict[str, float]:
    """Send the requests of all clients, and measure."""
    first: list[float] = []
    between: list[float] = []

    async def send(text: list[int]) -> None:
        body = {"model": "model", "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True}
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        )
        began = last = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n".encode() + sent)
        seen = False
        while part := await reader.read(1 << 16):
            if b"data: {" in part:
                now = time.perf_counter()
                (between if seen else first).append(now - (last if seen else began))
                seen, last = True, now
        writer.close()
        assert seen, "a request was refused"

    async def client() -> None:
        while texts:
            await send(texts.pop())

    made = len(texts) * tokens
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    found = {"tokens_per_second": made / seconds}
    for name, values in (("first_token", first), ("between_tokens", between)):
        cuts = statistics.quantiles(values, n=20) if len(values) > 1 else values * 19
        found |= {f"{name}_p50": cuts[9], f"{name}_p95": cuts[18]}
    return found


def main() -> None:
    if "--as-clients" in sys.argv:
        print(json.dumps(asyncio.run(as_clients(**json.load(sys.stdin)))))
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("source", nargs="?", help="run, checkpoint or exported folder")
    options.add_argument("--clients", type=int, nargs="*", default=[1, 16, 64])
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    torch.manual_seed(0)
    if given.source is None:
        model = ib.build(load_spec("word_problem_s3").final_model).eval()
    else:
        model = ib.load_model(given.source)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    print("clients  decoder tok/s  HTTP tok/s  share  first token p50/p95  between tokens p50/p95 (ms)")
    for clients in given.clients:
        texts = prompts(2 * clients, model.spec.vocab_size)
        alone, found = [], []
        for _ in range(given.repeats):
            alone.append(direct(model, clients, given.tokens, texts))
            found.append(through_http(model, clients, given.tokens, texts))
        median = {name: statistics.median(one[name] for one in found) for name in found[0]}
        share = median["tokens_per_second"] / statistics.median(alone)
        times = [
            f"{1e3 * median[f'{name}_p50']:.0f}/{1e3 * median[f'{name}_p95']:.0f}"
            for name in ("first_token", "between_tokens")
        ]
        rates = f"{statistics.median(alone):13.0f}  {median['tokens_per_second']:10.0f}"
        print(f"{clients:7}  {rates}  {share:5.2f}  {times[0]:>19}  {times[1]:>22}", flush=True)


if __name__ == "__main__":
    main()
