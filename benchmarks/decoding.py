"""Decoding on one GPU: milliseconds per iteration, for one sequence and for many.

    python benchmarks/decoding.py [--models mamba2_1.3b llama_1.3b] [--rows 1 64] [--context 512]
    python benchmarks/decoding.py --tiny --device cpu       # check that it runs

Random weights in bfloat16 (autocast; weight norm computed once), tolerance 0 and ``--iterations`` iterations,
so that every token takes the same number of calls of the map and one more to commit it. An *iteration* is a
call of the map on all rows; its time is that of decoding as a whole, including sampling, divided by the
number of calls. A token takes ``calls_per_token`` calls, so that the text of each row grows by
``tokens_per_second_per_row`` = 1000 / (``calls_per_token`` * ``ms``). (``decoding_calls.py`` measures the
calls of trained models.) ``replay_ms`` is the time of a call alone. ``--states`` are the types of stored
states: Mamba2's ``h`` in float32 or bfloat16, keys and values in bfloat16 or int8; types that do not apply to
a model are skipped. The inputs of the convolution are in bfloat16. ``floor_ms`` is the time to read weights
and states once at the GPU's copy bandwidth, which is measured first.

Modes: ``fused``, kernels for single tokens, captured as a graph; ``graphs``, the layers, captured;
``eager``, the layers in eager mode; ``int8`` and ``fp8``, as ``fused``, with weights in 8 bits in the
first half of the iterations of each token (``replay_ms`` is such a call). With several tokens in flight per
row (``--in-flight``) a call is one of the wavefront, the choice of tokens included, with a tolerance that no
search reaches, so that the calls of a token say nothing and are left out; ``replay_ms`` includes the head,
which reads its weights in every call. The published implementation takes 86.7 ms (mamba2_1.3b) and 52.2 ms
(llama_1.3b) per iteration for one sequence, in float32, on an H100.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
import traceback
from typing import Any

import torch
from report import machine, write

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.search.options import SearchOptions

PUBLISHED = {"mamba2_130m": 41.8, "llama_130m": 20.6, "mamba2_1.3b": 86.7, "llama_1.3b": 52.2}
MODES = ("fused", "graphs", "eager", "int8", "fp8")
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
STATES = {"mamba2": ("float32", "bfloat16"), "llama": ("bfloat16", "int8")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mamba2_1.3b", "llama_1.3b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fused"])
    parser.add_argument("--states", nargs="+", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1], help="tokens in flight per row")
    parser.add_argument("--context", type=int, default=512, help="prompt length in tokens")
    parser.add_argument("--iterations", type=int, default=16, help="iterations per token")
    parser.add_argument("--tokens", type=int, default=6, help="timed tokens per row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64")
    parser.add_argument(
        "--layers", type=int, default=None, help="maximum number of layers, to fill the compilers' caches"
    )
    parser.add_argument(
        "--output", default="decoding", help="name in benchmarks/results, or a path without .json"
    )
    arguments = parser.parse_args()
    speed = copying_speed(arguments.device)
    rows = []
    for name in arguments.models:
        model = built(name, arguments)
        for count in arguments.rows:
            known = STATES[name.split("_")[0]]
            states = [state for state in arguments.states or known[:1] if state in known]
            for mode, state, in_flight in itertools.product(arguments.modes, states, arguments.in_flight):
                if mode in CODES and in_flight > 1:  # these searches are of one token per text
                    continue
                work = {
                    "model": name,
                    "rows": count,
                    "context": arguments.context,
                    "mode": mode,
                    "state": state,
                    "in_flight": in_flight,
                }
                try:
                    found = measure(model, count, mode, state, in_flight, speed, arguments)
                    rows.append(work | found)
                except (RuntimeError, torch.OutOfMemoryError):
                    rows.append(work | {"failed": traceback.format_exc(limit=4)})
                rows[-1]["published_ms"] = PUBLISHED.get(name) if count == 1 else None
                print(rows[-1], flush=True)
                keep(rows, arguments)  # after each row, so that a killed process keeps its results
                gc.collect()
        del model
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    keep(rows, arguments)
    table(rows, speed)


def keep(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    write(arguments.output, {"machine": machine(), "arguments": vars(arguments), "rows": rows})


def built(name: str, arguments: argparse.Namespace) -> Any:
    spec: Any = ib.load_spec(name).model
    if arguments.tiny:
        mixer = spec.mixer.model_copy(update={"n_heads": 4} if name.startswith("llama") else {"d_state": 16})
        mlp = None if spec.mlp is None else spec.mlp.model_copy(update={"d_ff": 96})
        sizes = {"d_model": 64, "n_layers": 2, "vocab_size": 61, "mixer": mixer, "mlp": mlp}
        spec = spec.model_copy(update=sizes)
    if arguments.layers is not None:
        spec = spec.model_copy(update={"n_layers": min(arguments.layers, spec.n_layers)})
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return ib.build(spec).eval()


@torch.no_grad()
def measure(
    model: Any,
    rows: int,
    mode: str,
    state: str,
    in_flight: int,
    speed: float | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    on_gpu, tokens = arguments.device == "cuda", arguments.tokens
    warm_up = 3  # tokens: eager, captured, replayed
    with torch.autocast(arguments.device, dtype=torch.bfloat16):
        decoder = ContinuousDecoder(
            model,
            max_batch_size=rows,
            buckets=[rows],
            max_seq_len=arguments.context + tokens + warm_up + 2,
            tolerance=0.0 if in_flight == 1 else 1e-30,
            max_iterations=arguments.iterations,
            graphs=mode != "eager",
            state_dtype=getattr(torch, state),
            max_in_flight=in_flight,
            search_dtype=CODES.get(mode),
        )
    batch = decoder.batch
    if mode == "graphs":
        batch.fused = None
    if on_gpu and mode in ("fused", *CODES) and batch.fused is None:
        raise RuntimeError("this model has no fused kernels")
    if on_gpu and mode == "fused" and decoder.wavefront is not None and decoder.wavefront.fused is None:
        raise RuntimeError("windows of this model have no fused kernels")
    batch.options = SearchOptions(max_iterations=1)  # prompts are not measured
    generator = torch.Generator().manual_seed(0)
    for _ in range(rows):
        prompt = torch.randint(model.spec.vocab_size, (arguments.context,), generator=generator)
        decoder.submit(Request(prompt=prompt, max_new_tokens=tokens + warm_up + 2))
    each = arguments.iterations + 1
    while decoder.calls < warm_up * each + 1:
        decoder.step()
    synchronize(on_gpu)
    before, made, start = decoder.calls, 0, time.perf_counter()
    while decoder.calls < before + tokens * each:
        made += len(decoder.step())
    synchronize(on_gpu)
    calls = decoder.calls - before
    total = (time.perf_counter() - start) / calls
    kept = [t for state in batch.states for t in vars(state).values() if torch.is_tensor(t) and t.ndim > 2]
    states = sum(t.nbytes for t in kept)
    if model.spec.mixer.kind == "attention":  # only the valid part of the cache
        states = states * arguments.context // decoder.max_seq_len
    weights = sum(t.nbytes for t in batch.weights.tensors())
    found = {
        "ms": round(1000 * total, 3),
        "weights_gb": round(weights / 1e9, 2),
        "states_gb": round(states / 1e9, 2),
        "state_types": sorted({str(t.dtype).removeprefix("torch.") for t in kept}),
        "finite": bool(batch.search.z.isfinite().all()),
    }
    if in_flight == 1:
        found["calls_per_token"] = round(calls * rows / made, 2)
        found["tokens_per_second_per_row"] = round(made / rows / calls / total, 2)
    if on_gpu:
        count, wavefront = 50, decoder.wavefront
        batch.busy_S.fill_(False)  # the same call without an effect
        if wavefront is not None:
            wavefront.flight.done.fill_(False)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            if wavefront is not None:
                wavefront.call(rows)
            elif decoder.quantized is None:
                batch.step(rows)
            else:
                decoder.quantized.step(rows)
        end.record()
        torch.cuda.synchronize()
        found["replay_ms"] = round(begin.elapsed_time(end) / count, 3)
    if on_gpu:
        found["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    if speed is not None:
        found["floor_ms"] = round(1000 * (weights + states) / speed, 3)
    return found


def copying_speed(device: str) -> float | None:
    """Return the copy bandwidth of the GPU (read and write) in bytes per second."""
    if device != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return 20 * 2 * source.nbytes / (milliseconds / 1000)


def synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def table(rows: list[dict[str, Any]], speed: float | None) -> None:
    described = machine()
    print(f"\n{described.get('gpu', described['cpu'])}, torch {described['torch']}, {described['date']}")
    if speed is not None:
        print(f"copy bandwidth {speed / 1e12:.2f} TB/s")
    print(
        "| model | rows | mode | in flight | ms per iteration | calls per token | tokens/s per row | "
        "call alone | floor | published | state |"
    )
    print("|" + " --- |" * 11)
    names = ("ms", "calls_per_token", "tokens_per_second_per_row", "replay_ms", "floor_ms", "published_ms")
    for row in rows:
        cells = [row.get(name) for name in (*names, "state_types")]
        print(
            f"| {row['model']} | {row['rows']} | {row['mode']} | {row['in_flight']} | "
            + " | ".join("" if cell is None else str(cell).strip("[]").replace("'", "") for cell in cells)
            + (" | failed |" if "failed" in row else " |")
        )


if __name__ == "__main__":
    main()
