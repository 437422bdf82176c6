"""Tensor and context parallelism on two GPUs: losses, tokens per second, memory and efficiency.

    python benchmarks/parallel_gpu.py [--cases losses context alone …] [--length 32768]

A case is a model in a division: ``context`` and ``tensor`` divide each sequence among all processes, under
``alone`` each process trains the whole model by itself, without communication. A step is the trainer's
(``trainer.run.step``): forward, backward, gradient exchange, clipping, fused AdamW; one synthetic sequence a
step, bfloat16 autocast, float32 master weights, activations of layers recomputed. Every search takes all
iterations of the spec, (4+1). The time is the median of ``--steps`` steps after ``--warm-up``.
``efficiency`` is the tokens per second of all processes divided by their number and by the tokens per second
of one that trains alone. ``losses`` trains small models in float32 for 20 steps, with other numbers of
iterations for each sequence, and compares the losses of the processes with those of one.

The processes are started again without a case that ends them. Rows are written as they arrive.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import RESULTS, machine

import implicit_blocks as ib
from implicit_blocks import registry
from trainer.data.source import Batch
from trainer.distributed import Layout, Ranks, join, lay_out, leave
from trainer.run.step import StepResult, training_step
from trainer.specs.distributed import DistributedSpec

SPEC = "llama_1.3b_bounded"
EVEN = "model.mlp.d_ff=5504"  # 5461 is odd: ranks cannot divide it
CASES: dict[str, dict[str, Any]] = {
    "context": {"divided": {"context": 2, "kind": "fsdp"}},
    "alone": {},
    "losses": {},
    "tensor": {"divided": {"tensor": 2}, "changes": [EVEN]},
    "alone_even": {"changes": [EVEN]},
    "context_longer": {"divided": {"context": 2, "kind": "fsdp"}, "times": 2},
    "alone_longer": {"times": 2},
}
BASELINES = {
    "context": "alone",
    "tensor": "alone_even",
    "context_longer": "alone_longer",
}
MAMBA2 = {"mixer": {"kind": "mamba2", "d_state": 16, "head_dim": 16, "chunk_size": 16}}
LLAMA = {"mixer": {"kind": "attention", "n_heads": 4}, "mlp": {"kind": "swiglu", "d_ff": 128}}
SMALL = {
    "kind": "implicit_lm",
    "vocab_size": 64,
    "d_model": 64,
    "n_layers": 2,
    "gradient": {"kind": "phantom", "steps": 1, "damping": 0.8},
    "stopping": {"tolerance": 0.05, "max_iterations": 12},
}
LOSS_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--length", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case after this time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE", help="overrides of the spec")
    parser.add_argument("--output", type=Path, default=RESULTS / "parallel_gpu.json")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    described = {**machine(), "gpus": torch.cuda.device_count()}
    settings = {"spec": SPEC, "length": arguments.length, "set": arguments.set}
    settings |= {name: getattr(arguments, name) for name in ("processes", "warm_up", "steps")}
    ends = time.time() + arguments.seconds
    rows: list[dict[str, Any]] = []
    remaining = list(arguments.cases)
    while remaining:
        progress = arguments.output.with_suffix(".rows")
        progress.unlink(missing_ok=True)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
        options = [*sys.argv[1:], "--seconds", str(ends - time.time()), "--worker", str(progress)]
        options += ["--cases", *remaining]
        done = subprocess.run([sys.executable, *launch, __file__, *options], check=False)
        new = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
        remaining = remaining[len(new) :]
        rows += new
        if remaining and not done.returncode:
            print(f"no time for {', '.join(remaining)}")
            remaining = []
        elif remaining:
            rows.append({"case": remaining.pop(0), "failed": f"exit code {done.returncode}"})
        progress.unlink(missing_ok=True)
        result = {"machine": described, **settings, "rows": with_efficiency(rows)}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    show(rows)
    print(f"written to {arguments.output}")


def work(arguments: argparse.Namespace) -> None:
    """Measure the cases on the ranks that torchrun has started; rank 0 appends the rows."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ends = time.time() + arguments.seconds
    ranks = join(arguments.device, timeout_minutes=1)
    for case in arguments.cases:
        if ranks.any(time.time() > ends):
            break
        row = losses(ranks) if case == "losses" else measure(case, ranks, arguments)
        if ranks.is_main:
            print(row, flush=True)
            with arguments.worker.open("a") as file:
                file.write(json.dumps({"case": case, **row}) + "\n")
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    leave()


def measure(case: str, ranks: Ranks, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of a case on one sequence per step."""
    chosen = CASES[case]
    length = arguments.length * chosen.get("times", 1)
    changes = ["model.stopping.tolerance=0", f"data.seq_len={length}", *chosen.get("changes", [])]
    run: Any = ib.load_spec(SPEC, [*changes, *arguments.set])
    spec = run.phase_specs()[0].model
    torch.manual_seed(0)
    with ranks.device:  # equal weights on every rank, because the seed is equal
        model = ib.build(spec)
    model.checkpoint_activations("layers")
    divided = chosen.get("divided")
    of_case = Ranks(ranks.device) if divided is None else ranks
    layout = lay_out(model, DistributedSpec.model_validate(divided or {}), of_case)
    optimizer = registry.build(run.training.optimizer, model=model)
    batch = random_batch(1, length, spec.vocab_size)
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    result = None
    try:
        for _ in range(arguments.warm_up + arguments.steps):
            ranks.barrier()
            began = time.perf_counter()
            result = step_of(layout, optimizer, batch, precision="bfloat16")
            if on_cuda:
                torch.cuda.synchronize()
            times.append(ranks.max([time.perf_counter() - began])[0])
    except torch.OutOfMemoryError as error:
        if divided is None:  # the other process fails at the same place
            return {"length": length, "failed": f"out of memory: {str(error).splitlines()[0]}"}
        raise
    assert result is not None
    assert result.search is not None
    seconds = statistics.median(times[arguments.warm_up :])
    peaks = [0.0, 0.0]
    if on_cuda:
        peaks = [torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9]
    every = ranks.gather(peaks)
    return {
        "layout": "one process" if divided is None else layout.resolved.name,
        "processes": of_case.world_size,
        "d_ff": spec.mlp.d_ff,
        "length": length,
        "iterations": result.search.iterations,
        "loss": result.loss,
        "first_step_seconds": round(times[0], 2),
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(length / seconds, 1),
        "peak_gb": [round(allocated, 1) for allocated, _ in every],
        "reserved_gb": [round(reserved, 1) for _, reserved in every],
    }


def losses(ranks: Ranks) -> dict[str, Any]:
    """Return the largest differences of 20 losses between the ranks together and one process."""
    found: dict[str, Any] = {}
    for name, parts in (("llama", LLAMA), ("mamba2", MAMBA2)):
        alone, iterations = small_run(parts, None, Ranks(ranks.device))
        spread = [min(iterations), max(iterations)]
        found[name] = {"iterations": spread, "first_loss": alone[0], "last_loss": alone[-1]}
        for division in ("tensor", "context"):
            together, calls = small_run(parts, {division: ranks.world_size}, ranks)
            gaps = [abs(one - other) for one, other in zip(alone, together, strict=True)]
            found[name][division] = {"largest": max(gaps), "same_iterations": calls == iterations}
    return {"steps": LOSS_STEPS, "largest_difference": found}


def small_run(
    parts: dict[str, Any], divided: dict[str, Any] | None, ranks: Ranks
) -> tuple[list[float], list[float]]:
    """Return the losses of a small model, and the mean iterations of its steps."""
    torch.manual_seed(0)
    with ranks.device:
        model: Any = ib.build(ib.ImplicitLMSpec.model_validate({**SMALL, **parts}))
    layout = lay_out(model, DistributedSpec.model_validate(divided or {}), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    results = []
    for number in range(LOSS_STEPS):
        batch = random_batch(4, 128, 64, seed=number)
        results.append(step_of(layout, optimizer, batch, precision="float32"))
    searches = [result.search for result in results if result.search is not None]
    assert any(search.iterations < search.iterations_max for search in searches), "rows stop one by one"
    return [result.loss for result in results], [search.iterations for search in searches]


def random_batch(rows: int, length: int, vocab_size: int, *, seed: int = 1) -> Batch:
    """Return a batch of random tokens, the same on every rank; the last rows have the most different ones."""
    chooser = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (rows, length + 1), generator=chooser)
    if rows > 1:
        ids %= 1 + 5 * torch.arange(rows)[:, None] ** 2
    return Batch(inputs=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())


def step_of(layout: Layout, optimizer: torch.optim.Optimizer, batch: Batch, *, precision: str) -> StepResult:
    """Make a step of the trainer, of which loss and gradient are finite."""
    result = training_step(
        layout,
        optimizer,
        batch,
        precision=precision,
        micro_batch_size=None,
        max_grad_norm=1.0,
        last_tokens=1,
    )
    if result.not_finite is not None:
        raise RuntimeError(f"a step is not finite: {result.not_finite}")
    return result


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the efficiency to the rows whose model was measured in one process."""
    speeds = {row["case"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    for row in rows:
        alone = speeds.get(BASELINES.get(row["case"], ""))
        if alone is not None and row["case"] in speeds:
            row["efficiency"] = round(speeds[row["case"]] / alone / row["processes"], 4)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = f"{'case':<16}{'length':>8}{'processes':>11}{'step s':>9}{'tokens/s':>11}{'efficiency':>12}"
    print(f"{head}  GB by rank (in use, reserved)")
    for row in rows:
        if "failed" in row:
            print(f"{row['case']:<16}  {row['failed']}")
        elif "largest_difference" in row:
            print(f"{row['case']:<16}  {json.dumps(row['largest_difference'])}")
        else:
            kept = f"{row['efficiency']:.1%}" if "efficiency" in row else ""
            print(
                f"{row['case']:<16}{row['length']:>8}{row['processes']:>11}{row['step_seconds']:>9.2f}"
                f"{row['tokens_per_second']:>11,.0f}{kept:>12}  {row['peak_gb']}, {row['reserved_gb']}"
            )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
