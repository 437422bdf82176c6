"""The kernels of a decoding call on one GPU: time of each, and the pauses between them.

    python benchmarks/decoding_profile.py [--models llama_1.3b mamba2_1.3b] [--calls 1 4 int8]
    python benchmarks/decoding_profile.py --tiny            # check that it runs, also without a GPU

Random weights in bfloat16, one row, ``--context`` tokens. A call is captured as a graph and replayed:
``1``, one token; ``4`` (any number), that many tokens in flight, with the head and the choice of tokens;
``int8`` and ``fp8``, one token with weights in 8 bits. Each is timed with launches that overlap and without
(``ops.kernels.overlap``), in alternation: medians of ``--rounds`` times 100 replays. The profiler gives start
and end of each kernel: kernels are grouped by name and grid, ``us`` is their mean duration and ``pause_us``
the mean time between the end of the kernel before and their start, negative where they overlap.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decoding import CODES, built, copying_speed
from report import machine, write

from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.search.options import SearchOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama_1.3b", "mamba2_1.3b"])
    parser.add_argument("--calls", nargs="+", default=["1", "4", "int8", "fp8"])
    parser.add_argument("--context", type=int, default=512, help="prompt length in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=None, help="maximum number of layers")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64")
    parser.add_argument("--no-kernels", action="store_true", help="times alone")
    parser.add_argument("--output", default="decoding_profile", help="name in benchmarks/results, or a path")
    arguments = parser.parse_args()
    arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    speed, rows = copying_speed(arguments.device), []
    for name in arguments.models:
        model = built(name, arguments)
        for kind in arguments.calls:
            rows.append({"model": name, "call": kind} | measure(model, kind, arguments))
            print({key: value for key, value in rows[-1].items() if key != "kernels"}, flush=True)
            for overlapping, kernels in rows[-1].get("kernels", {}).items():
                print(f"  {overlapping}:")
                for each in kernels:
                    print("    " + "  ".join(f"{value}" for value in each.values()), flush=True)
            write(arguments.output, {"machine": machine(), "copy_bytes_per_s": speed, "rows": rows})
            gc.collect()
        del model
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def measure(model: Any, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    call = call_of(decoder_of(model, kind, arguments))
    if arguments.device != "cuda":
        call()
        return {}
    from implicit_blocks.ops.kernels import overlap

    graphs = {}
    for overlapping in (False, True):
        overlap.ENABLED = overlapping
        graphs["overlapping" if overlapping else "in sequence"] = captured(call)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name, graph in graphs.items():
            times[name].append(timed(graph))
    found: dict[str, Any] = {f"ms {name}": round(statistics.median(each), 4) for name, each in times.items()}
    if not arguments.no_kernels:
        found["kernels"] = {name: kernels_of(graph) for name, graph in graphs.items()}
    return found


def decoder_of(model: Any, kind: str, arguments: argparse.Namespace) -> ContinuousDecoder:
    """Return a decoder whose calls change nothing that is committed."""
    in_flight = int(kind) if kind.isdigit() else 1
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # which has no bfloat16
    with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=not interpreted):
        decoder = ContinuousDecoder(
            model,
            max_batch_size=1,
            max_seq_len=arguments.context + 16,
            tolerance=1e-30,
            max_iterations=1000,
            max_in_flight=in_flight,
            search_dtype=CODES.get(kind),
        )
    batch = decoder.batch
    if arguments.device == "cuda" and batch.fused is None:
        raise RuntimeError("this model has no fused kernels")
    batch.options = SearchOptions(max_iterations=1)  # prompts are not measured
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.spec.vocab_size, (arguments.context,), generator=generator)
    decoder.submit(Request(prompt=prompt, max_new_tokens=8))
    for _ in range(in_flight + 1):
        decoder.step()
    batch.busy_S.fill_(False)  # calls change nothing that is committed
    return decoder


def call_of(decoder: ContinuousDecoder) -> Callable[[], None]:
    """Return a call of the map on the decoder's text."""
    batch = decoder.batch
    rows_R = batch.places("step", 1).rows_R
    if decoder.wavefront is not None:
        wavefront = decoder.wavefront
        assert wavefront.whole is not None or batch.device.type == "cpu"
        results, whole = wavefront.results(1), wavefront.whole
        run = wavefront._call if whole is None else whole.call
        return lambda: in_precision(decoder, lambda: run(rows_R, results))
    if decoder.quantized is not None:
        quantized = decoder.quantized
        return lambda: in_precision(decoder, lambda: quantized._step(rows_R))
    return lambda: in_precision(decoder, lambda: batch._step(rows_R, commit=True))


def in_precision(decoder: ContinuousDecoder, run: Callable[[], None]) -> None:
    with decoder.batch.precision():
        run()


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return the graph of a call, after two eager ones."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def timed(graph: torch.cuda.CUDAGraph, count: int = 100) -> float:
    """Return the milliseconds of a replay."""
    for _ in range(5):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


def kernels_of(graph: torch.cuda.CUDAGraph, count: int = 10) -> list[dict[str, Any]]:
    """Return the kernels of a replay by name and grid: number, mean duration, mean pause before them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = sorted(
        (event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"]
    )
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    before = None
    for event in events:
        begin, duration = float(event["ts"]), float(event["dur"])
        pause = 0.0 if before is None else begin - before
        key = event["name"][:60], str(event["args"].get("grid"))
        groups[key].append((duration, min(pause, 100.0)))  # longer: between two replays
        before = begin + duration
    found = [
        {
            "kernel": name,
            "grid": grid,
            "number": len(each) / count,
            "us": round(statistics.fmean(duration for duration, _ in each), 2),
            "pause_us": round(statistics.fmean(pause for _, pause in each), 2),
        }
        for (name, grid), each in groups.items()
    ]
    return sorted(found, key=lambda row: -row["number"] * row["us"])


if __name__ == "__main__":
    main()
