"""A search over the tiles of products of windows: times of whole captured decoding calls.

    python benchmarks/decoding_tiles.py [--models llama_1.3b mamba2_1.3b] [--seconds 150] [--output FOLDER]
    TRITON_INTERPRET=1 python benchmarks/decoding_tiles.py --tiny       # check that it runs, without a GPU

Random weights in bfloat16, one row, ``--context`` tokens. A call on ``--tokens`` tokens in flight is captured
as a graph with the tiles of ``tiles_of`` (*before*), and with those of each product in turn replaced by each
of ``CANDIDATES``; the graphs of both calls are replayed alternately, and what is faster by ``LEAST`` is kept.
The ratio is that to a call on one token. ``logits_error`` is the distance of the logits from those before,
relative to their length: rounding alone makes it 0.01 or so. Results are written after each row.

Products are ``in`` (the mixer's, without a convolution), ``conv`` (Mamba2's), ``gate`` (of the MLP), ``added
WIDTH`` (to the residual stream), ``head``; ``scan`` is Mamba2's.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decoding import built
from decoding_profile import call_of, captured, decoder_of, timed
from report import machine, write

from implicit_blocks.decoding import ContinuousDecoder

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LEAST = 0.002  # relative gain


@dataclass
class Product:
    """Tiles that stay in registers: outputs, warps, tiles of inputs at a time, tiles ahead, trigger."""

    outputs: int
    warps: int
    at_once: int
    ahead: int = 99
    trigger: int = 0

    def tiles(self) -> Any:
        from implicit_blocks.ops.kernels.decoding_window import Tiles

        numbers = {"outputs": self.outputs, "warps": self.warps, "parts": self.warps, "ahead": self.ahead}
        return Tiles(**numbers, inputs=32, stages=0, trigger=self.trigger, direct=self.at_once)


NARROW = [
    Product(8, 4, 16, 16), Product(8, 4, 4, 4), Product(8, 4, 8, 8), Product(16, 4, 8, 8), Product(8, 4, 4),
    Product(8, 8, 8, 4), Product(16, 8, 8),
]  # fmt: skip
CANDIDATES: dict[str, list[Product]] = {
    "gate": [
        Product(8, 4, 4, 4), Product(8, 4, 4, 2), Product(8, 4, 4, 6), Product(8, 4, 2, 4),
        Product(8, 4, 8, 4), Product(16, 8, 8), Product(8, 4, 4, 8), Product(8, 8, 8, 4), Product(8, 4, 16),
    ],
    "added 5504": [
        Product(16, 8, 8), Product(16, 8, 4, 12), Product(16, 8, 8, 12), Product(8, 8, 4, 12),
        Product(8, 8, 8), Product(8, 16, 11), Product(8, 16, 4, 8),
    ],
    "added 4096": [
        Product(8, 8, 4), Product(8, 8, 8, 8), Product(16, 8, 4, 8), Product(16, 8, 8, 16),
        Product(8, 4, 4, 8), Product(16, 16, 8), Product(8, 16, 8), Product(8, 8, 4, 8), Product(8, 8, 6, 10),
    ],
    "conv": [
        Product(8, 4, 4, 4, trigger=2), Product(8, 4, 4, 8, trigger=2), Product(8, 4, 8, 8, trigger=2),
        Product(8, 8, 8, trigger=2), Product(8, 4, 4, 16, trigger=2), Product(16, 8, 8, trigger=2),
        Product(8, 4, 16, trigger=1),
    ],
    "in": NARROW,
    "added 2048": NARROW,
    "head": NARROW,
}  # fmt: skip
SCANS = [(32, 16), (32, 8), (16, 4)]
"""Features and warps of a program of the scan."""
TINY = [Product(8, 2, 1), Product(16, 2, 2, 1)]

Chosen = dict[str, Any]
"""Tiles by product, those of ``tiles_of`` for others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama_1.3b", "mamba2_1.3b"])
    parser.add_argument("--tokens", type=int, default=4, help="tokens in flight")
    parser.add_argument("--seconds", type=float, default=150, help="time of the whole program")
    parser.add_argument("--context", type=int, default=512, help="prompt length in tokens")
    products = [*CANDIDATES, "scan"]
    parser.add_argument("--products", nargs="+", default=products, choices=products, help="in this order")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=None, help="maximum number of layers")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64")
    parser.add_argument("--output", type=Path, default=None, help="folder; default: benchmarks/results")
    arguments = parser.parse_args()
    began = time.monotonic()
    arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.tiny:
        arguments.context = min(arguments.context, 16)
    table = Table(arguments)
    searches: list[Search] = []
    for name in arguments.models:  # the first rows of all models, before any search
        with table.failures(name):
            searches.append(Search(name, table, arguments))
    for number, search in enumerate(searches):
        left = began + arguments.seconds - time.monotonic()
        with table.failures(search.name):
            search.run(time.monotonic() + left / (len(searches) - number))
    table.show()


class Table:
    """The rows, which are written after each new one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.given = {name: str(value) for name, value in vars(arguments).items()}
        folder = arguments.output
        self.path = "decoding_window_tiles"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = str(folder.resolve() / self.path)
        elif arguments.tiny:
            self.path += "_tiny"
        self.began = time.monotonic()

    def add(self, **row: Any) -> dict[str, Any]:
        row["seconds"] = round(time.monotonic() - self.began, 1)
        self.rows.append(row)
        print(row, flush=True)
        write(self.path, {"machine": machine(), "arguments": self.given, "rows": self.rows})
        return row

    @contextmanager
    def failures(self, model: str, name: str = "") -> Iterator[None]:
        """Add a row for an error instead of ending the program."""
        try:
            yield
        except Exception:
            self.add(model=model, name=name, failed=traceback.format_exc(limit=6))

    def show(self) -> None:
        print("\n| model | call | ms | to one token | tiles |\n| --- | --- | --- | --- | --- |")
        for row in self.rows:
            if "ratio" in row and row.get("kept", True):
                print(f"| {row['model']} | {row['name']} | {row['ms']} | {row['ratio']} | {row['tiles']} |")


@dataclass
class Replay:
    """A call and its graph; both keep what the graph reads and writes."""

    call: Callable[[], None]
    graph: torch.cuda.CUDAGraph | None = field(default=None)

    def ms(self) -> float:
        if self.graph is not None:
            return timed(self.graph, 60)
        began = time.perf_counter()
        self.call()
        return 1000 * (time.perf_counter() - began)


class Search:
    """The calls of a model: first rows at once, then the search."""

    def __init__(self, name: str, table: Table, arguments: argparse.Namespace) -> None:
        from implicit_blocks.ops.kernels import decoding_window, decoding_window_scan

        self.name, self.table, self.arguments = name, table, arguments
        self.modules: tuple[Any, Any] = decoding_window, decoding_window_scan
        self.linear_window, self.scan = decoding_window.linear_window, decoding_window_scan.TILES
        self.products: dict[str, Any] = {}
        model = built(name, arguments)
        self.decoders = [prepared(model, count, arguments) for count in (1, arguments.tokens)]
        self.one, self.many = (call_of(decoder) for decoder in self.decoders)
        self.single = self.replay({}, self.one)
        before = self.replay({})
        self.expected = self.logits(before)
        times = self.alternately({"one": self.single, "before": before})
        self.single_ms = times["one"]
        self.row("1 token", times["one"], {})
        self.row(f"{arguments.tokens} tokens, before", times["before"], {})
        self.best: tuple[Chosen, Replay] = ({}, before)

    def run(self, until: float) -> None:
        """Replace the tiles of each product in turn, as long as there is time."""
        for product, tiles in self.candidates():
            if time.monotonic() > until - 4:
                break
            with self.table.failures(self.name, f"{product}: {tiles}"):
                self.attempt(product, tiles)
        chosen, best = self.best
        times = self.alternately({"one": self.single, "best": best})
        self.single_ms = times["one"]
        self.row("1 token, at the end", times["one"], {})
        self.row(f"{self.arguments.tokens} tokens, best", times["best"], chosen, self.error(best))

    def attempt(self, product: str, tiles: Any) -> None:
        chosen, best = self.best
        changed = chosen | {product: tiles}
        if tiles == chosen.get(product, self.products.get(product)):
            return
        other = self.replay(changed)
        times = self.alternately({"best": best, "other": other})
        kept = times["other"] < times["best"] * (1 - LEAST)
        self.row(
            f"{product}: {tiles}", times["other"], changed, self.error(other), kept=kept, best=times["best"]
        )
        if kept:
            self.best = changed, other
        gc.collect()

    def candidates(self) -> Iterator[tuple[str, Any]]:
        """Yield products, in the given order, with tiles and with places where the next kernel may start."""
        tiny, convolves = self.arguments.tiny, "conv" in self.products
        for product in [*self.products, "scan"] if tiny else self.arguments.products:
            if product == "scan" and convolves:
                for features, warps in SCANS[:1] if tiny else SCANS:
                    yield "scan", type(self.scan)(features, warps)
            if product not in self.products or (product == "in" and convolves):
                continue
            for each in TINY if tiny else CANDIDATES[product]:
                yield product, each.tiles()
            for trigger in (1, 2):
                tiles = self.best[0].get(product, self.products[product])
                if tiles.trigger != trigger:
                    yield product, tiles._replace(trigger=trigger)

    def replay(self, chosen: Chosen, call: Callable[[], None] | None = None) -> Replay:
        """Return a call with these tiles, by default that on several tokens; captured on a GPU."""
        call = self.many if call is None else call

        def run() -> None:
            with self.using(chosen), torch.no_grad():
                call()

        if self.arguments.device != "cuda":
            run()
            return Replay(run)
        gc.collect()
        gc.disable()  # a graph that is freed during a capture would end it
        try:
            return Replay(run, captured(run))
        finally:
            gc.enable()

    @contextmanager
    def using(self, chosen: Chosen) -> Iterator[None]:
        """Replace the tiles of products and of the scan."""

        def linear_window(x: Any, weight: Any, *others: Any, **options: Any) -> Any:
            product = product_of(weight, options)
            self.products[product] = default_tiles(x.value_TK, weight, options)
            return self.linear_window(x, weight, *others, **(options | {"tiles": chosen.get(product)}))

        window, scan = self.modules
        window.linear_window, scan.TILES = linear_window, chosen.get("scan", self.scan)
        try:
            yield
        finally:
            window.linear_window, scan.TILES = self.linear_window, self.scan

    def alternately(self, replays: dict[str, Replay]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(self.arguments.rounds if self.arguments.device == "cuda" else 1):
            for name, replay in replays.items():
                times[name].append(replay.ms())
        return {name: statistics.median(each) for name, each in times.items()}

    def logits(self, replay: Replay) -> torch.Tensor | None:
        wavefront = self.decoders[1].wavefront
        if wavefront is None:
            return None
        replay.call() if replay.graph is None else replay.graph.replay()
        logits: torch.Tensor = wavefront.results(1).logits.float().clone()
        return logits

    def error(self, replay: Replay) -> float | None:
        logits = self.logits(replay)
        if logits is None or self.expected is None:
            return None
        return float((logits - self.expected).norm() / self.expected.norm())

    def row(self, name: str, ms: float, tiles: Chosen, error: float | None = None, **more: Any) -> None:
        numbers = {"ms": round(ms, 4), "ratio": round(ms / self.single_ms, 3)}
        known = {product: list(each) for product, each in tiles.items()}
        self.table.add(model=self.name, name=name, **numbers, tiles=known, logits_error=error, **more)


def default_tiles(x: torch.Tensor, weight: torch.Tensor, options: dict[str, Any]) -> Any:
    """Return the tiles that a product has without a choice."""
    from implicit_blocks.ops.kernels.decoding_window import tiles_of

    kinds = {"gate": options.get("gate_MK") is not None, "conv": options.get("conv") is not None}
    outputs, width = weight.shape
    return tiles_of(outputs, width, len(x), wide=x.dtype.itemsize > 2, **kinds)


def product_of(weight: torch.Tensor, options: dict[str, Any]) -> str:
    """Return the name of a product by its arguments."""
    for name, argument in (("conv", "conv"), ("gate", "gate_MK"), ("head", "out_TM")):
        if options.get(argument) is not None:
            return name
    return "in" if options.get("z_TM") is None else f"added {weight.shape[1]}"


def prepared(model: Any, tokens: int, arguments: argparse.Namespace) -> ContinuousDecoder:
    """Return a decoder; in Triton's interpreter with the kernels of a GPU."""
    decoder = decoder_of(model, str(tokens), arguments)
    if INTERPRETED and decoder.wavefront is not None:
        from implicit_blocks.decoding.slots.fused_flight import fused_flight
        from implicit_blocks.decoding.slots.fused_map import FusedMap
        from implicit_blocks.decoding.slots.fused_windows import FusedWindows

        batch, wavefront = decoder.batch, decoder.wavefront
        batch.fused = FusedMap(model, batch.states, batch.weights, max_seq_len=batch.ends.max_seq_len)
        wavefront.fused = FusedWindows(batch.fused, torch.float32)
        wavefront.whole = fused_flight(wavefront, wavefront.fused)
    return decoder


if __name__ == "__main__":
    main()
