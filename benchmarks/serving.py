"""Tokens per second through HTTP against those of the decoder driven directly, and the latencies of streams.

    python benchmarks/serving.py [SOURCE] [--clients 1 16 64] [--tokens 64] [--repeats 5]
    python benchmarks/serving.py --gpu                # books_10m at 1, 16, 64 and 256 clients

Both generate the same texts with as many slots as clients. HTTP and the clients have processes of their own:
they share the cores with the decoder, but not its interpreter. Repeats alternate between the two. Shares are
those of the direct decoder: of its tokens per second, and of its processor time per token, which depends less
on what else the machine does. "CPU" is the processor time of the process with the model, "front" that of the
HTTP process. The table has medians.

With ``--stub`` the model is replaced by a decoder that only counts tokens, at the given number of tokens per
second: what the HTTP process can take.

Without SOURCE the weights are new, of the size of ``--spec``. Searches with new weights take many iterations
at the spec's tolerance; ``--tolerance 0.1`` takes about eight for ``word_problem_s3``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import machine, write

import implicit_blocks as ib
from implicit_blocks.decoding import NewToken, Request
from implicit_blocks.serving.decoded_texts import Decoder
from implicit_blocks.serving.hosting import Host
from implicit_blocks.serving.language import Numbers
from implicit_blocks.serving.listening import listen
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.processes import HttpProcess
from implicit_blocks.solution import Solution
from implicit_blocks.specs import load_spec

PROMPT = 16  # tokens
CLIENTS = Path(__file__).with_name("http_clients.py")
HEADER = (
    "clients  decoder tok/s  HTTP tok/s  share  CPU us/token  HTTP CPU us/token  share  front CPU us/token  "
    "first token p50/p95 (ms)  between tokens p50/p95 (ms)"
)


class Wanted(NamedTuple):
    """A text that is requested: its prompt, and the number of its new tokens."""

    prompt: list[int]
    tokens: int


def wanted(count: int, vocab_size: int, tokens: int, *, equal: bool) -> list[Wanted]:
    """Return texts with random prompts, and lengths between half of ``tokens`` and its 3/2, unless equal."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(vocab_size, (count, PROMPT), generator=generator).tolist()
    lengths = torch.randint(-(-tokens // 2), tokens * 3 // 2 + 1, (count,), generator=generator).tolist()
    return [Wanted(prompt, tokens if equal else own) for prompt, own in zip(found, lengths, strict=True)]


class Text:
    """A text of ``Stub``: its number, and the tokens it has left."""

    def __init__(self, number: int, left: int) -> None:
        self.number, self.left = number, left


class Stub:
    """Stands for a decoder that makes a number of tokens per second and takes no processor time for them.

    A step makes a token for every fourth text, as searches of four iterations do.
    """

    accepts_limits = True
    on_prompts: Callable[[list[int], Solution | None], None] | None = None
    before_prompts: Callable[[], None] | None = None
    logits = torch.empty(0)

    def __init__(self, slots: int, rate: float) -> None:
        self.texts: list[Text | None] = [None] * slots
        self.waiting: deque[Text] = deque()
        self.rate, self.steps, self.due, self.submitted = rate, 0, 0.0, 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.texts)

    def submit(self, request: Request) -> int:
        self.waiting.append(Text(self.submitted, request.max_new_tokens))
        self.submitted += 1
        return self.submitted - 1

    def cancel(self, number: int) -> bool:
        found = next((text for text in (*self.texts, *self.waiting) if text and text.number == number), None)
        if found is None:
            return False
        self.texts = [None if text is found else text for text in self.texts]
        self.waiting = deque(text for text in self.waiting if text is not found)
        return True

    def step(self) -> list[NewToken]:
        entering = []
        for slot, text in enumerate(self.texts):
            if text is None and self.waiting:
                text = self.texts[slot] = self.waiting.popleft()
                entering.append(text.number)
        if entering and self.on_prompts is not None:
            self.on_prompts(entering, None)
        self.steps += 1
        made = []
        for slot, text in enumerate(self.texts):
            if text is not None and (slot + self.steps) % min(4, len(self.texts)) == 0:
                text.left -= 1
                made.append(NewToken(text.number, 7, not text.left, self.logits, 4, 0.01, True))
                if not text.left:
                    self.texts[slot] = None
        self.due = max(self.due, time.perf_counter() - 0.01) + len(made) / self.rate
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return made

    def run(self) -> Iterator[NewToken]:
        while self.busy:
            yield from self.step()


def direct(decoder: Decoder, clients: int, texts: list[Wanted], body: dict[str, Any]) -> dict[str, float]:
    """Return tokens per second, seconds of processor time and iterations per token, of the decoder.

    As many texts as clients are in the decoder; when one ends, the next one is submitted.
    """
    left = iter(texts)

    def submit(count: int) -> None:
        for prompt, tokens in islice(left, count):
            decoder.submit(Request(prompt=prompt, max_new_tokens=tokens, tolerance=body.get("tolerance")))

    began, used = time.perf_counter(), time.process_time()
    iterations: list[int] = []
    submit(clients)
    while decoder.busy:
        made = decoder.step()
        iterations += [token.iterations or 0 for token in made]
        submit(sum(token.last for token in made))
    return {
        "tokens_per_second": len(iterations) / (time.perf_counter() - began),
        "cpu_per_token": (time.process_time() - used) / len(iterations),
        "iterations": statistics.fmean(iterations),
    }


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def through_http(
    port: int, front: int, clients: int, texts: list[Wanted], body: dict[str, Any]
) -> dict[str, float]:
    """Return the same of the server, and seconds to the first token and between tokens, of streams."""
    order = json.dumps({"port": port, "clients": clients, "texts": texts, "body": body})
    used, used_by_front = time.process_time(), processor_time(front)
    done = subprocess.run(
        [sys.executable, str(CLIENTS)], input=order, capture_output=True, text=True, check=True
    )
    used, used_by_front = time.process_time() - used, processor_time(front) - used_by_front
    found: dict[str, float] = json.loads(done.stdout)
    count = sum(text.tokens for text in texts)
    return {**found, "cpu_per_token": used / count, "front_cpu_per_token": used_by_front / count}


@contextlib.contextmanager
def served(host: Host) -> Iterator[tuple[int, int]]:
    """Run a server; yield its port, and the ID of its HTTP process."""
    listening = listen(host.options)
    port = listening.getsockname()[1]
    with HttpProcess([host], listening) as process:
        process.wait_until_ready()
        yield port, process.pid


def compare(
    model: Any,
    clients: int,
    texts: list[Wanted],
    body: dict[str, Any],
    *,
    repeats: int,
    stub: float | None,
) -> dict[str, Any]:
    """Return the medians of alternating repeats with a number of clients."""
    longest = max(text.tokens for text in texts)
    options = ServerOptions(
        port=0, max_batch_size=clients, max_seq_len=PROMPT + longest, max_queue=4 * clients
    )
    make_stub: Any = (
        None if stub is None else partial(Stub, clients, stub)
    )  # not one of the library's decoders
    host = Host("model", model, Numbers(), options, make_decoder=make_stub)
    decoder = host.new_decoder() if make_stub is None else make_stub()
    pairs = []
    with served(host) as (port, front):
        short = [text._replace(tokens=-(-text.tokens // 8)) for text in texts]
        direct(decoder, clients, short, body)  # captures graphs, and fills caches
        through_http(port, front, clients, short, body)
        for _ in range(repeats):
            alone = direct(decoder, clients, texts, body)
            pairs.append((alone, through_http(port, front, clients, texts, body)))
    medians = {name: statistics.median(one[name] for one, _ in pairs) for name in pairs[0][0]}
    http = {name: statistics.median(one[name] for _, one in pairs) for name in pairs[0][1]}
    shares = [one["tokens_per_second"] / other["tokens_per_second"] for other, one in pairs]
    cpu = [other["cpu_per_token"] / one["cpu_per_token"] for other, one in pairs]
    return {
        "clients": clients,
        "texts": len(texts),
        "direct": medians,
        "http": http,
        "share": statistics.median(shares),
        "shares": shares,
        "cpu_share": statistics.median(cpu),
        "cpu_shares": cpu,
    }


def line(found: dict[str, Any]) -> str:
    alone, http = found["direct"], found["http"]
    times = [
        f"{1e3 * http[f'{name}_p50']:.0f}/{1e3 * http[f'{name}_p95']:.0f}"
        for name in ("first_token", "between_tokens")
    ]
    return (
        f"{found['clients']:7}  {alone['tokens_per_second']:13.0f}  {http['tokens_per_second']:10.0f}  "
        f"{found['share']:5.2f}  {1e6 * alone['cpu_per_token']:12.1f}  {1e6 * http['cpu_per_token']:17.1f}  "
        f"{found['cpu_share']:5.2f}  {1e6 * http['front_cpu_per_token']:18.1f}  "
        f"{times[0]:>24}  {times[1]:>27}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("source", nargs="?", help="run, checkpoint or exported folder")
    options.add_argument("--spec", help="size of new weights (default: word_problem_s3)")
    options.add_argument("--gpu", action="store_true", help="measure books_10m at 1, 16, 64, 256 clients")
    options.add_argument("--clients", type=int, nargs="+", help="numbers of clients (default: 1 16 64)")
    options.add_argument("--tokens", type=int, help="mean number of new tokens per text (default: 64)")
    options.add_argument("--equal", action="store_true", help="as many new tokens in all texts")
    options.add_argument("--texts", type=int, default=4, metavar="N", help="texts per client (default: 4)")
    options.add_argument("--tolerance", type=float, help="tolerance of the searches (default: the spec's)")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    options.add_argument("--stub", type=float, metavar="RATE", help="tokens per second without a model")
    options.add_argument("--record", metavar="NAME", help="write results/NAME.json")
    arguments = options.parse_args()
    clients = arguments.clients or ([1, 16, 64, 256] if arguments.gpu else [1, 16, 64])
    spec = arguments.spec or ("books_10m" if arguments.gpu else "word_problem_s3")
    tokens = arguments.tokens or (128 if arguments.gpu else 64)
    body: dict[str, Any] = {"model": "model", "temperature": 0}
    if arguments.tolerance is not None:
        body["tolerance"] = arguments.tolerance
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.source is None:
        model = ib.build(load_spec(spec).final_model).eval()
    else:
        model = ib.load_model(arguments.source)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(HEADER)
    rows = []
    for count in clients:
        texts = wanted(arguments.texts * count, model.spec.vocab_size, tokens, equal=arguments.equal)
        rows.append(compare(model, count, texts, body, repeats=arguments.repeats, stub=arguments.stub))
        print(line(rows[-1]), flush=True)
        if arguments.record is not None:
            source = spec if arguments.source is None else Path(arguments.source).name
            request = {**body, "max_tokens": tokens, "equal": arguments.equal}
            write(
                arguments.record, {"machine": machine(), "source": source, "request": request, "rows": rows}
            )


if __name__ == "__main__":
    main()
