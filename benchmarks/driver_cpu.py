"""Overhead of the search loop over the bare map on the CPU: Picard by ``Search`` against a loop over ``f``.

The map is that of the zoo's 130M models (``llama_130m`` and ``mamba2_130m``) in float32 with random weights,
iterated a fixed number of times. Both run alternately; medians of processor time are compared.

    python benchmarks/driver_cpu.py [--models llama_130m] [--length 256] [--iterations 4]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from report import machine, write

import implicit_blocks as ib
from implicit_blocks.weights.cache import WeightCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama_130m", "mamba2_130m"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments) for name in arguments.models]
    write("driver_cpu", {"machine": machine(), "arguments": vars(arguments), "rows": rows})


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    spec: Any = ib.load_spec(name).model
    model = ib.build(spec)
    ids = torch.randint(spec.vocab_size, (arguments.batch, arguments.length))
    f, start = model.bind(
        model.embedding(ids),
        model.initial_state(arguments.batch),
        weights=WeightCache(model),
        valid_BL=None,
        documents_BL=None,
    )

    def bare() -> None:
        z = start
        for _ in range(arguments.iterations):
            z = f(z)

    def driven(scope: Literal["sequence", "prefix"]) -> None:
        stopping = ib.Stopping(tolerance=0.0, max_iterations=arguments.iterations, scope=scope)
        ib.Search(solver=ib.Picard(), stopping=stopping)(f, start)

    runs: dict[str, Callable[[], None]] = {
        "bare": bare,
        "sequence": lambda: driven("sequence"),
        "prefix": lambda: driven("prefix"),
    }
    times: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(arguments.repeats + 1):
        for key, run in runs.items():
            begin = time.process_time()
            run()
            if repeat:  # the first round warms up
                times[key].append(time.process_time() - begin)
    median = {key: statistics.median(values) for key, values in times.items()}
    row = {
        "model": name,
        "bare_s": round(median["bare"], 4),
        "overhead_sequence_percent": round(100 * (median["sequence"] / median["bare"] - 1), 2),
        "overhead_prefix_percent": round(100 * (median["prefix"] / median["bare"] - 1), 2),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
