"""Word-problem sequences generated per second on one core.

    OMP_NUM_THREADS=1 python benchmarks/word_problem_generator.py

Measures `WordProblem.sample`, from the generator to int64 tensors (and smaller types), with the process on
one core; each figure is the median of repetitions, with the fastest and slowest. Then the published draw
order, and `WordProblemStream.batch` at the batch sizes of training. The required rate is 200,000 sequences of
length 256 per second of processor time: on an idle machine this equals wall time, on a busy one it counts
only the time given to this process. Writes ``results/word_problem_generator.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from report import cpu_model

from trainer.data.word_problem import DrawOrder, WordProblem, WordProblemStream

REQUIRED = 200_000
PROBLEMS = [("S3", None), ("A5", None), ("A5", "EABX"), ("S5", None), ("S5", "EABX")]


def rate(make: Callable[[], object], sequences: int, *, seconds: float) -> dict[str, int]:
    """Return sequences per second: median, slowest and fastest of the calls within `seconds` (at least 7).

    These use wall time, which on a busy machine includes the time of other processes; in addition, over all
    calls, the rate by processor time of this process.
    """
    make()
    times: list[float] = []
    used = time.process_time()
    while sum(times) < seconds or len(times) < 7:
        start = time.perf_counter()
        make()
        times.append(time.perf_counter() - start)
    used = time.process_time() - used
    return {
        "median": round(sequences / statistics.median(times)),
        "slowest": round(sequences / max(times)),
        "fastest": round(sequences / min(times)),
        "by_processor_time": round(sequences * len(times) / used),
        "repetitions": len(times),
    }


def measure(*, length: int, p: float, seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def add(
        group: str, monoid: str | None, order: DrawOrder, what: str, n: int, make: Callable[[], object]
    ) -> None:
        name = group if monoid is None else f"{group} x {monoid}"
        figures = rate(make, n, seconds=seconds)
        rows.append(
            {
                "problem": name,
                "draw_order": order,
                "call": what,
                "sequences_per_call": n,
                "sequences_per_second": figures,
            }
        )
        print(
            f"{name:10s} {order:10s} {what:13s} n={n:5d}  {figures['median']:9,d}/s  "
            f"({figures['slowest']:,} to {figures['fastest']:,}; "
            f"{figures['by_processor_time']:,} by processor time)"
        )

    for group, monoid in PROBLEMS:
        problem = WordProblem(group=group, monoid=monoid, identity_probability=p)
        generator = torch.Generator().manual_seed(0)
        for dtype in (torch.int64, torch.int32, torch.uint8):
            if dtype == torch.uint8 and problem.vocab_size > 256:
                continue
            what = f"sample {str(dtype).removeprefix('torch.')}"
            for n in (512, 8192):
                add(group, monoid, "fast", what, n, lambda: problem.sample(n, length, generator, dtype=dtype))  # noqa: B023  # called immediately
        if monoid or group == "S3":
            stream = WordProblemStream(problem, length=length, seed=0)
            add(group, monoid, "fast", "stream int64", 128, lambda: stream.batch(128 * 1000, 128))  # noqa: B023  # called immediately
    problem = WordProblem(group="A5", monoid="EABX", identity_probability=p, draw_order="published")
    add("A5", "EABX", "published", "sample int64", 2048, lambda: problem.sample(2048, length, generator))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--identity-probability", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per figure")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "word_problem_generator.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    pinned = hasattr(os, "sched_setaffinity")
    if pinned:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    rows = measure(length=args.length, p=args.identity_probability, seconds=args.seconds)
    worst = min(
        row["sequences_per_second"]["by_processor_time"]  # type: ignore[index]  # a dict of figures, created above
        for row in rows
        if row["draw_order"] == "fast" and "int64" in str(row["call"])
    )
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_model(), "system": platform.system(), "cores_used": 1, "pinned": pinned},
        "load_average_at_start": load,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "length": args.length,
        "identity_probability": args.identity_probability,
        "required_sequences_per_second": REQUIRED,
        "lowest_fast_int64_by_processor_time": worst,
        "results": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"lowest int64 rate in the fast order by processor time: {worst:,} sequences/s, required {REQUIRED:,}"
    )
    return 0 if worst >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
