"""Training throughput on several GPUs of a machine: tokens per second per GPU, and scaling efficiency.

    python benchmarks/scaling.py [--gpus 1 2 4 8] [--specs llama_1.3b_bounded …] [--layouts ddp fsdp]

Each number of GPUs is a separate run of this file under torchrun. A step is the trainer's
(``trainer.run.step``): forward, backward, gradient exchange, clipping over all ranks, fused AdamW; synthetic
tokens, ``--rows`` sequences of 2048 per GPU (4: 8192 tokens), bfloat16 autocast, float32 master weights.
Every search takes all iterations of the spec, (4+1), so that all steps have equal work. The time is the
median of ``--steps`` after warm-up, between barriers. The efficiency is the tokens per second per GPU divided
by those on one GPU in the same table, which may come from another run on the same machine (``--beside``). The
environment (``NCCL_…``) is inherited. ``--profile`` adds a breakdown of two more steps on rank 0 in
milliseconds per
step: communication (``exchange_ms``), the part without overlap (``exposed_ms``), and idle time (``idle_ms``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import machine, write
from torch._C._autograd import DeviceType

import implicit_blocks as ib
from implicit_blocks import registry
from trainer.data.source import Batch
from trainer.distributed import join, lay_out, leave
from trainer.run.step import training_step
from trainer.specs.distributed import DistributedSpec

LENGTH = 2048
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--specs", nargs="+", default=["llama_1.3b_bounded", "mamba2_1.3b_bounded"])
    parser.add_argument("--layouts", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp", "layer"])
    parser.add_argument("--rows", type=int, default=4, help="sequences per GPU and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs where weights are whole")
    parser.add_argument(
        "--late", action="store_true", help="exchange gradients after backward, for comparison"
    )
    parser.add_argument(
        "--profile", action="store_true", help="report how much of the communication overlaps"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE", help="overrides of the specs")
    parser.add_argument("--output", default="scaling")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="result files whose rows are added to the table"
    )
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    there = torch.cuda.device_count()
    rows: list[dict[str, Any]] = [
        row for path in arguments.beside for row in json.loads(path.read_text())["rows"]
    ]
    for gpus in arguments.gpus:
        if there and gpus > there:
            print(f"{gpus} GPUs: skipped, {there} available", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "rows.json"
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
            command = [sys.executable, *launch, __file__, *sys.argv[1:], "--worker", str(result)]
            done = subprocess.run(command, check=False)
            if not result.exists():
                rows.append({"gpus": gpus, "failed": f"exit code {done.returncode}"})
                continue
            rows += json.loads(result.read_text())
    with_efficiency(rows)
    show(rows)
    named = {name: value for name, value in vars(arguments).items() if name not in ("worker", "beside")}
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    path = write(arguments.output, {"machine": machine(), "arguments": named, "nccl": nccl, "rows": rows})
    print(f"written to {path}")


def work(arguments: argparse.Namespace) -> None:
    """Measure every spec in every layout on the ranks that torchrun has started; rank 0 writes the rows."""
    ranks = join(arguments.device)
    rows = []
    for layout in ["none"] if ranks.is_single else arguments.layouts:
        for name in arguments.specs:
            row = {"spec": name, "gpus": ranks.world_size, "layout": layout}
            try:
                row |= measure(name, layout, ranks, arguments)
            except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
                row["failed"] = str(error).splitlines()[0]
                if not ranks.is_single:  # the ranks are no longer synchronized
                    raise
            rows.append(row)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if ranks.is_main:
                print(row, flush=True)
                arguments.worker.write_text(json.dumps(rows))
    leave()


def measure(name: str, layout_name: str, ranks: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps of the trainer in one layout."""
    torch.compiler.reset()
    changes = ["model.stopping.tolerance=0", f"data.seq_len={arguments.length}", *arguments.set]
    run: Any = ib.load_spec(name, changes)
    spec = run.phase_specs()[0].model
    torch.manual_seed(0)
    with ranks.device:  # equal weights on every rank, because the seed is equal
        model = ib.build(spec)
    if arguments.compile:
        model.compile_layers()
    if arguments.graphs and layout_name in ("none", "ddp"):
        model.capture_graphs()
    unit = "layer" if layout_name == "layer" else "model"
    kind = {"none": "auto", "layer": "fsdp"}.get(layout_name, layout_name)
    layout = lay_out(model, DistributedSpec.model_validate({"kind": kind, "unit": unit}), ranks)
    if arguments.late:
        model.backbone.gradients_by_layer = False
    optimizer = registry.build(run.training.optimizer, model=model)
    sequences = arguments.rows * arguments.micro_batches
    torch.manual_seed(1 + ranks.rank)
    ids = torch.randint(spec.vocab_size, (sequences, arguments.length + 1))
    batch = Batch(inputs=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()

    def step() -> Any:
        result = training_step(
            layout,
            optimizer,
            batch,
            precision="bfloat16",
            micro_batch_size=arguments.rows,
            max_grad_norm=1.0,
            last_tokens=1,
        )
        if result.not_finite is not None:
            raise RuntimeError(f"the step of {name} is not finite: {result.not_finite}")
        return result

    times, result = [], None
    for _ in range(arguments.steps + WARM_UP):
        ranks.barrier()
        began = time.perf_counter()
        result = step()
        if on_cuda:
            torch.cuda.synchronize()
        times.append(ranks.max([time.perf_counter() - began])[0])
    seconds = statistics.median(times[WARM_UP:])
    tokens = sequences * arguments.length
    row = {
        "tokens_per_gpu": tokens,
        "iterations": None if result is None or result.search is None else result.search.iterations,
        "first_step_seconds": round(times[0], 2),
        "step_seconds": round(seconds, 5),
        "tokens_per_second_per_gpu": round(tokens / seconds, 1),
        "tokens_per_second": round(ranks.world_size * tokens / seconds, 1),
    }
    if on_cuda:
        row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)  # without the memory of graphs
        row["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
    if arguments.profile and on_cuda:
        row |= profiled(step, steps=2)
    return row


def profiled(step: Callable[[], Any], *, steps: int) -> dict[str, float]:
    """Return the breakdown of steps on this rank's GPU in milliseconds per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end, "nccl" in event.name) for event in kernels]
    every = covered([(start, end) for start, end, _ in spans])
    work = covered([(start, end) for start, end, exchange in spans if not exchange])
    exchange = covered([(start, end) for start, end, exchange in spans if exchange])
    whole = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    parts = {"exchange_ms": exchange, "exposed_ms": every - work, "idle_ms": whole - every}
    return {name: round(microseconds / 1e3 / steps, 2) for name, microseconds in parts.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def with_efficiency(rows: list[dict[str, Any]]) -> None:
    """Add the scaling efficiency to each row, if one GPU was measured."""
    alone = {
        row["spec"]: row["tokens_per_second_per_gpu"] for row in rows if row["gpus"] == 1 and "spec" in row
    }
    for row in rows:
        if "tokens_per_second_per_gpu" in row and row["spec"] in alone:
            row["efficiency"] = round(row["tokens_per_second_per_gpu"] / alone[row["spec"]], 4)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'spec':<24}{'layout':<8}{'GPUs':>5}{'tokens/s/GPU':>16}{'tokens/s':>12}{'kept':>8}{'GB':>7}")
    for row in rows:
        if "failed" in row:
            print(f"{row.get('spec', ''):<24}{row.get('layout', ''):<8}{row['gpus']:>5}  {row['failed']}")
            continue
        kept = f"{row['efficiency']:.1%}" if "efficiency" in row else ""
        print(
            f"{row['spec']:<24}{row['layout']:<8}{row['gpus']:>5}{row['tokens_per_second_per_gpu']:>16,.0f}"
            f"{row['tokens_per_second']:>12,.0f}{kept:>8}{row.get('peak_gb', ''):>7}"
        )


if __name__ == "__main__":
    main()
