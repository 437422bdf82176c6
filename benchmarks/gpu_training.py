"""Training throughput on one GPU: tokens a second, peak memory and iterations for models of the zoo.

    python benchmarks/gpu_training.py [--works llama_130m mamba2_130m …] [--compile] [--graphs] [--fixed 4]

A *work* is a zoo model with a batch: those of ``WORKS``, the shapes that the published implementation was
timed at on an H100 (its figures stand beside ours). Synthetic tokens; bfloat16 autocast, float32 masters,
fused AdamW. The time is that of whole steps (forward, backward, clipping, optimizer), the median of
``--steps`` after warming up, by CUDA events. Model FLOPs are counted by ``implicit_blocks.specs.counting``
from the iterations taken.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import traceback
from typing import Any

import torch
from report import machine, write

import implicit_blocks as ib

# name: (zoo spec, rows, tokens a row, published tokens a second on an H100, published peak GB)
WORKS: dict[str, tuple[str, int, int, int | None, float | None]] = {
    "llama_130m_explicit": ("llama_130m_explicit", 8, 2048, 135_233, 19.5),
    "llama_130m_bounded": ("llama_130m_bounded", 8, 2048, 64_687, 19.9),
    "llama_1.3b_bounded": ("llama_1.3b_bounded", 4, 2048, 6_133, 46.1),
    "mamba2_130m_explicit": ("mamba2_130m_explicit", 8, 2048, 70_119, 17.9),
    "mamba2_130m_bounded": ("mamba2_130m_bounded", 8, 2048, 48_638, 18.4),
    "mamba2_1.3b_bounded": ("mamba2_1.3b_bounded", 4, 2048, 10_949, 42.0),
    "state_tracking": ("mamba2_state_tracking", 512, 256, 642_693, 8.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="compile the map")
    parser.add_argument("--graphs", action="store_true", help="record the map as CUDA graphs")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before those that are timed")
    parser.add_argument(
        "--fixed", type=int, default=None, help="take so many iterations, whatever the residual"
    )
    parser.add_argument("--output", default="gpu_training")
    arguments = parser.parse_args()
    rows = []
    for work in arguments.works:
        torch.compiler.reset()  # the works share the layers' code, and its cache holds eight shapes
        try:
            rows.append(measure(work, arguments))
        except (RuntimeError, torch.OutOfMemoryError):
            rows.append({"work": work, "failed": traceback.format_exc(limit=3)})
        print(rows[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    write(arguments.output, {"machine": machine(), "arguments": vars(arguments), "rows": rows})


def measure(work: str, arguments: argparse.Namespace) -> dict[str, Any]:
    name, batch, length, published, published_gb = WORKS[work]
    spec = ib.load_spec(name).model
    if arguments.fixed is not None:
        stopping = ib.Stopping(tolerance=0.0, max_iterations=arguments.fixed)
        spec = spec.model_copy(update={"stopping": stopping})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ib.build(spec).train()
    if arguments.compile:
        model.compile_layers()
    if arguments.graphs:
        model.capture_graphs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    ids = torch.randint(spec.vocab_size, (batch, length + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times, iterations = [], []
    for step in range(arguments.steps + arguments.warm_up):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(ids[:, :-1], labels=ids[:, 1:], return_logits=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        if step >= arguments.warm_up:
            times.append(start.elapsed_time(end) / 1000)
            if out.solution is not None:
                iterations.append(out.solution.iterations.float().mean().item())
    rate = batch * length / statistics.median(times)
    return {
        "work": work,
        "tokens_per_second": round(rate),
        "published_tokens_per_second": published,
        "times_published": None if published is None else round(rate / published, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),  # without what recorded graphs keep
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 1),
        "published_peak_gb": published_gb,
        "iterations": round(statistics.mean(iterations), 1) if iterations else None,
        "loss": round(out.loss.item(), 3),
    }


if __name__ == "__main__":
    main()
