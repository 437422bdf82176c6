"""Profile of captured training steps on one GPU: time by kernel, idle time, and the parts of a step.

    python benchmarks/gpu_profile.py [--works llama_130m_bounded …] [--as-published] [--rows 45]
    python benchmarks/gpu_profile.py --tiny --works llama_130m_bounded   # check that it runs, without a GPU

The models are compiled and captured, as in ``gpu_training.py --compile --graphs``. One step is recorded by
``torch.profiler`` after the warm-up. A row contains the milliseconds and launches of the longest kernels
(``kernels``) and of groups of kernels (``groups``), the time in which no kernel runs between the first and
the last one (``idle_ms``), the longest of these gaps with their neighbors (``gaps``), the calls of the CUDA
runtime by the host (``calls``: total milliseconds, number, longest), and the median milliseconds of the parts
of a step by CUDA events (``parts``), with those until the host has launched each part (``host``).
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
import traceback
from collections import defaultdict
from typing import Any

import torch
from gpu_training import Steps
from gpu_workloads import WORKS
from on_device import device, keep, model_of, parser, seconds, synchronize
from report import machine, write
from torch.profiler import DeviceType

import implicit_blocks as ib

GROUPS = {
    "products": r"gemm|nvjet|cutlass|cublas|s\d+816|sm90_xmma|splitK|addmm",
    "attention": r"flash|fmha|cudnn_generated|sdpa",
    "mamba": r"chunk|ssd|_conv_|gated_norm|walk|step_sizes|state_passing|bmm_chunk",
    "compiled": r"^triton_",
    "optimizer": r"Adam|multi_tensor|foreach|LpNorm",
    "copies": r"^Mem(cpy|set)|copy_kernel|CatArray",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS), metavar="WORK")
    options.add_argument("--warm-up", type=int, default=6, help="unrecorded steps")
    options.add_argument("--steps", type=int, default=4, help="steps timed by events")
    options.add_argument("--as-published", action="store_true", help="the published number of iterations")
    options.add_argument("--rows", type=int, default=45, help="number of kernels listed")
    options.add_argument("--output", default="gpu_profile", help="name of the file in results")
    options.add_argument(
        "--search-dtype", choices=["float8_e4m3fn"], default=None, help="8-bit floats in searches"
    )
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for work in arguments.works:
        torch.compiler.reset()
        try:
            rows.append(measure(work, arguments))
        except (RuntimeError, torch.OutOfMemoryError):
            rows.append({"work": work, "failed": traceback.format_exc(limit=3)})
        show(rows[-1])
        keep(rows, arguments)  # after each row, so that a killed process keeps its results
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if arguments.json is None:
        given = {name: value for name, value in vars(arguments).items() if name != "json"}
        write(arguments.output, {"machine": machine(), "arguments": given, "rows": rows})


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Profile a step of a work."""
    began, work = time.perf_counter(), WORKS[name]
    fixed = work.iterations if arguments.as_published else None
    changes = {} if fixed is None else {"stopping": ib.Stopping(tolerance=0.0, max_iterations=fixed)}
    model = model_of(
        work.spec,
        tiny=arguments.tiny,
        layers=arguments.layers,
        changes=changes,
        compiled=not arguments.tiny,
        graphs=True,
    )
    batch, length = (2, 32) if arguments.tiny else (work.rows, work.length)
    if arguments.search_dtype is not None:
        model.quantize_search(getattr(torch, arguments.search_dtype))
    run = Steps(model, batch, length)
    for _ in range(arguments.warm_up):
        run.step()
    synchronize()
    ready = time.perf_counter() - began
    milliseconds = statistics.median(1000 * seconds(run.step) for _ in range(arguments.steps))
    row: dict[str, Any] = {
        "work": name,
        "search_dtype": arguments.search_dtype,
        "tokens_per_second": round(1000 * batch * length / milliseconds),
        "ms_per_step": round(milliseconds, 2),
        "ready_s": round(ready, 1),
        **parts(run, arguments.steps),
    }
    if torch.cuda.is_available():
        row["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
    return row | profiled(run.step, arguments.rows)


def parts(run: Steps, steps: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of the parts of a step, each waited for, and since its beginning."""
    times, host = defaultdict(list), defaultdict(list)
    found: dict[str, Any] = {
        "forward": run.forward,
        "backward": run.backward,
        "clipping": lambda: torch.nn.utils.clip_grad_norm_(run.parameters, 1.0),
        "optimizer": run.optimizer.step,
    }
    for _ in range(steps):
        for name, part in found.items():
            times[name].append(1000 * seconds(part))
        run.optimizer.zero_grad()
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        for name, part in found.items():
            part()
            host[name].append(1000 * (time.perf_counter() - began))
        run.optimizer.zero_grad()
    kinds = (("parts", times), ("host", host))
    return {
        kind: {name: round(statistics.median(values), 2) for name, values in taken.items()}
        for kind, taken in kinds
    }


def profiled(call: Any, count: int) -> dict[str, Any]:
    """Return the kernels of a call: total milliseconds, launches, gaps. Empty without a GPU."""
    if device().type != "cuda":
        call()
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        synchronize()
    everything = profile.events() or []
    events = [e for e in everything if e.device_type == DeviceType.CUDA]
    calls: dict[str, list[float]] = defaultdict(list)
    for event in everything:
        if event.device_type == DeviceType.CPU and event.name.startswith("cu"):
            calls[event.name].append(event.time_range.elapsed_us() / 1000)
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    total: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    gaps: list[tuple[float, str, str]] = []
    idle, until, last = 0.0, spans[0][0], ""
    for start, end, name in spans:
        total[name] += (end - start) / 1000
        launches[name] += 1
        if start > until:
            idle += start - until
            gaps.append((start - until, last, name))
        if end > until:
            until, last = end, name
    groups: dict[str, float] = defaultdict(float)
    for name, took in total.items():
        groups[next((group for group, rule in GROUPS.items() if re.search(rule, name)), "other")] += took
    longest = sorted(total, key=lambda name: -total[name])
    return {
        "span_ms": round((until - spans[0][0]) / 1000, 2),
        "idle_ms": round(idle / 1000, 2),
        "launches": len(spans),
        "groups": {name: round(took, 2) for name, took in sorted(groups.items(), key=lambda g: -g[1])},
        "calls": {
            name: [round(sum(times), 2), len(times), round(max(times), 2)]
            for name, times in sorted(calls.items(), key=lambda call: -sum(call[1]))[:10]
        },
        "kernels": [[round(total[n], 3), launches[n], n[:110]] for n in longest[:count]],
        "gaps": [[round(us, 1), a[:60], b[:60]] for us, a, b in sorted(gaps, reverse=True)[:12]],
    }


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    lists = {key: row.get(key, []) for key in ("kernels", "gaps")}
    print({key: value for key, value in row.items() if key not in lists}, flush=True)
    for took, launches, name in lists["kernels"]:
        print(f"  {took:9.3f} ms {launches:6d} x {name}")
    for took, before, after in lists["gaps"]:
        print(f"  idle {took:7.1f} µs between {before} and {after}")


if __name__ == "__main__":
    main()
