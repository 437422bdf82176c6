"""Long prompts on one GPU: tokens per second and memory, beside training's forward pass.

    python benchmarks/prefill.py [--models llama_1.3b mamba2_1.3b] [--tokens 32768] [--chunk 2048]
    python benchmarks/prefill.py --tiny --device cpu        # check that it runs

Random weights in bfloat16 (autocast). A prompt is solved by ``ContinuousDecoder`` in chunks
(``prefill_chunk``), with tolerance 0 and ``--iterations`` iterations and one call to commit each chunk;
*forward* is the same number of calls on 4 × 2048 tokens without a state, as in training's forward pass.
Rates are tokens × calls per second. The keys of a long prompt add to the work of attention: ``flop_ratio`` is
the arithmetic of a prompt's token relative to that of a token of the forward pass.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from decoding import built, synchronize
from report import machine, write

from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.search.options import SearchOptions

LENGTH = 2048  # tokens per sequence of the forward pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama_1.3b", "mamba2_1.3b"])
    parser.add_argument("--tokens", type=int, default=32768, help="prompt length")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens per chunk")
    parser.add_argument("--iterations", type=int, default=4, help="iterations of each search")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64, 256 tokens")
    parser.add_argument("--layers", type=int, default=None, help="maximum number of layers")
    parser.add_argument("--output", default="prefill", help="name in benchmarks/results, or a path")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.tokens, arguments.chunk = 256, 64
    rows = []
    for name in arguments.models:
        model = built(name, arguments)
        row = {"model": name, "tokens": arguments.tokens, "chunk": arguments.chunk}
        rows.append(row | measure(model, arguments))
        print(rows[-1], flush=True)
        write(arguments.output, {"machine": machine(), "arguments": vars(arguments), "rows": rows})
        del model
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def measure(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu, calls = arguments.device == "cuda", arguments.iterations + 1
    length = 64 if arguments.tiny else LENGTH
    options = SearchOptions(tolerance=0.0, max_iterations=arguments.iterations)
    ids = torch.randint(model.spec.vocab_size, (4, length), device=arguments.device)
    with torch.autocast(arguments.device, dtype=torch.bfloat16):
        weights = model.cache_weights()

        def forward() -> None:
            model.encode(model.embedding(ids), ids_BL=ids, search=options, weights=weights)

        seconds = timed(forward, 3, on_gpu)
        decoder = ContinuousDecoder(
            model,
            max_batch_size=1,
            max_seq_len=arguments.tokens + 8,
            prefill_chunk=arguments.chunk,
            tolerance=0.0,
            max_iterations=arguments.iterations,
        )
    forward_rate = ids.numel() * calls / seconds
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)

    def prompt(tokens: int) -> None:
        prompt = torch.randint(model.spec.vocab_size, (tokens,), generator=generator)
        decoder.submit(Request(prompt=prompt, max_new_tokens=1))
        for _ in decoder.run():
            pass

    prompt(min(3 * arguments.chunk, arguments.tokens))  # attention to one and to two chunks before
    begin = time.perf_counter()
    prompt(arguments.tokens)
    synchronize(on_gpu)
    seconds = time.perf_counter() - begin
    rate = arguments.tokens * calls / seconds
    found = {
        "seconds": round(seconds, 2),
        "tokens_times_calls_per_second": round(rate),
        "forward_tokens_times_calls_per_second": round(forward_rate),
        "share_of_forward": round(rate / forward_rate, 3),
        "flop_ratio": round(flop(model, arguments.tokens) / flop(model, length), 2),
    }
    if on_gpu:
        found["allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        found["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
    return found


def flop(model: Any, tokens: int) -> float:
    """Return the arithmetic of a token of a causal sequence: weights, and on average half of the keys."""
    spec = model.spec
    layers = sum(p.numel() for block in model.backbone.blocks() for p in block.parameters())
    keys = tokens / 2 if spec.mixer.kind == "attention" else 0
    return float(2 * layers + 4 * keys * spec.d_model * spec.n_layers)


def timed(call: Any, count: int, on_gpu: bool) -> float:
    """Return the seconds of a call."""
    call()
    synchronize(on_gpu)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(on_gpu)
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    main()
