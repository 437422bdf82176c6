"""Effect of windowed searches on a training step: seconds (processor time on a CPU), iterations, loss.

The program takes steps (search, differentiated steps, backward; no update) with a trained implicit model on
sequences of several lengths, with the search over all tokens together and in windows.

    python benchmarks/windows.py --checkpoint runs/s3 [--lengths 32 128] [--windows 32 16 8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from report import machine, write

from trainer.experiments.runs import evaluation_batch, trained, trained_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="RUN")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--windows", type=int, nargs="+", default=[32, 16, 8])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--max-iterations", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments)
    given = {**vars(arguments), "checkpoint": arguments.checkpoint.name}
    write("windows", {"machine": machine(), "arguments": given, "rows": rows})


def measure(arguments: argparse.Namespace) -> list[dict[str, float | int | str]]:
    name, spec, weights = trained(arguments.checkpoint)
    model = trained_model(spec, weights)[0].to(arguments.device).train()
    stopping = model.spec.stopping.model_copy(update={"max_iterations": arguments.max_iterations})
    base = model.spec.model_copy(update={"stopping": stopping})
    rows: list[dict[str, float | int | str]] = []
    for length in arguments.lengths:
        batch = evaluation_batch(spec, sequences=arguments.sequences, length=length).to(
            torch.device(arguments.device)
        )
        for window in (None, *(size for size in arguments.windows if size < length)):
            model.reconfigure(base.model_copy(update={"window_length": window}))
            seconds = []
            for _ in range(arguments.repeats):
                began = now(arguments.device)
                output = model(batch.inputs, labels=batch.labels, return_logits=False, **batch.context())
                output.loss.backward()
                seconds.append(now(arguments.device) - began)
            row: dict[str, float | int | str] = {
                "run": name,
                "length": length,
                "window_length": "all" if window is None else window,
                "seconds": round(statistics.median(seconds), 3),
                "iterations": round(float(output.solution.iterations.double().mean()), 1),
                "converged": float(output.solution.converged.double().mean()),
                "loss": round(float(output.loss.detach()), 5),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


if __name__ == "__main__":
    main()
