"""Training throughput on one GPU: tokens per second, peak memory and iterations for models of the zoo.

    python benchmarks/gpu_training.py [--works llama_130m_bounded …] [--compile] [--graphs] [--as-published]

A *work* is a zoo model with a batch (``gpu_workloads.py``): the shapes at which the published implementation
was timed on an H100. Synthetic tokens; bfloat16 autocast, float32 master weights, fused AdamW. The time is
that of whole steps (forward, backward, clipping, optimizer): the median of ``--steps`` after warm-up, by CUDA
events, each waited for; ``running_tokens_per_second`` is the rate of as many steps without a pause, as in
training, where the host prepares a step while the GPU works on the one before. Model FLOPs are computed by
``implicit_blocks.models.counting`` from the iterations taken. ``--search-dtypes`` chooses searches in 8-bit
floats. ``--as-published`` takes the iterations of the published implementation, regardless of the residual. A
row also contains the number of graph breaks of the compiler (``graph_breaks``), the number of implicit
synchronizations per step (``waits``, by ``torch.cuda.set_sync_debug_mode``), and the duration of building,
compiling and warm-up (``ready_s``).
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from gpu_workloads import WORKS, Work
from on_device import (
    CARD,
    bfloat16,
    count_synchronizations,
    device,
    graph_breaks,
    keep,
    model_of,
    parser,
    seconds,
    synchronize,
)
from report import machine, write

import implicit_blocks as ib
from implicit_blocks.models.counting import training_flops_per_token


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS), metavar="WORK")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--compile", action="store_true", help="compile the map")
    options.add_argument("--graphs", action="store_true", help="capture the map in CUDA graphs")
    options.add_argument("--warm-up", type=int, default=12, help="untimed steps")
    options.add_argument(
        "--fixed", type=int, default=None, help="fixed number of iterations, regardless of the residual"
    )
    options.add_argument(
        "--as-published", action="store_true", help="iterations of the published implementation"
    )
    options.add_argument("--output", default="gpu_training", help="name of the file in results")
    options.add_argument(
        "--search-dtypes",
        nargs="+",
        choices=["none", "float8_e4m3fn"],
        default=None,
        help="types of the products in searches, one after the other (default: those of each work)",
    )
    arguments = options.parse_args()
    rows = []
    for work in arguments.works:
        torch.compiler.reset()  # works share the layers' code, whose cache has eight entries
        try:
            for row in measured(work, arguments):
                rows.append(row)
                print(row, flush=True)
                keep(rows, arguments)  # after each row, so that a killed process keeps its results
        except (RuntimeError, torch.OutOfMemoryError):
            rows.append({"work": work, "failed": traceback.format_exc(limit=3)})
            print(rows[-1], flush=True)
            keep(rows, arguments)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if arguments.json is None:
        given = {name: value for name, value in vars(arguments).items() if name != "json"}
        write(arguments.output, {"machine": machine(), "arguments": given, "rows": rows})


class Steps:
    """The steps of a work on synthetic tokens.

    Args:
        model: the model, in training mode.
        batch: number of sequences.
        length: tokens per sequence.

    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.ids = torch.randint(model.spec.vocab_size, (batch, length + 1), device=device())
        self.out: Any = None
        """The output of the last step."""

    def forward(self) -> None:
        """Compute the loss."""
        with bfloat16():
            self.out = self.model(self.ids[:, :-1], labels=self.ids[:, 1:], return_logits=False)

    def backward(self) -> None:
        """Compute the gradients of the loss."""
        self.out.loss.backward()

    def forward_and_backward(self) -> None:
        """Compute the loss and its gradients."""
        self.forward()
        self.backward()

    def step(self) -> None:
        """Take a whole step: forward, backward, clipping, optimizer."""
        self.forward_and_backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        """Take steps without waiting for the device."""
        for _ in range(count):
            self.step()


def measured(name: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the steps of a work, with one model for all types of the products in searches."""
    began = time.perf_counter()
    work = WORKS[name]
    fixed = work.iterations if arguments.as_published else arguments.fixed
    changes = {} if fixed is None else {"stopping": ib.Stopping(tolerance=0.0, max_iterations=fixed)}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    breaks = graph_breaks()
    model = model_of(
        work.spec,
        tiny=arguments.tiny,
        layers=arguments.layers,
        changes=changes,
        compiled=arguments.compile,
        graphs=arguments.graphs,
    )
    batch, length = (2, 32) if arguments.tiny else (work.rows, work.length)
    run = Steps(model, batch, length)
    for dtype in arguments.search_dtypes or work.search_dtypes:
        if dtype != "none":
            model.quantize_search(getattr(torch, dtype))
        row = {"work": name, "search_dtype": None if dtype == "none" else dtype}
        yield row | measure(run, work, arguments, began=began, breaks=breaks)
        run.optimizer.zero_grad()  # those of the step whose synchronizations were counted
        began, breaks = time.perf_counter(), graph_breaks()


def measure(
    run: Steps, work: Work, arguments: argparse.Namespace, *, began: float, breaks: int
) -> dict[str, Any]:
    """Time the steps of a model that was built since ``began``, with ``breaks`` graph breaks until then."""
    batch, length = run.ids.shape[0], run.ids.shape[1] - 1
    for _ in range(arguments.warm_up):
        run.step()
    synchronize()
    ready = time.perf_counter() - began
    times, iterations = [], []
    for _ in range(arguments.steps):
        times.append(seconds(run.step))
        if run.out.solution is not None:
            iterations.append(run.out.solution.iterations.float().mean().item())
    running = batch * length * arguments.steps / seconds(lambda: run.steps(arguments.steps))
    if not math.isfinite(loss := run.out.loss.item()):
        raise RuntimeError(f"the loss is {loss} after {arguments.warm_up + 2 * arguments.steps} steps")
    mean_iterations = statistics.mean(iterations) if iterations else None
    rate = batch * length / statistics.median(times)
    flops = training_flops_per_token(run.model.spec, length=length, iterations=mean_iterations)
    published, on_gpu = work.tokens_per_second, torch.cuda.is_available()
    return {
        "tokens_per_second": round(rate),
        "running_tokens_per_second": round(running),
        "published_tokens_per_second": published,
        "times_published": round(rate / published, 2),
        "iterations": None if mean_iterations is None else round(mean_iterations, 1),
        "published_iterations": work.iterations,
        "gflop_per_token": None if flops is None else round(flops / 1e9, 3),
        "share_of_card": None if flops is None else round(rate * flops / CARD, 6),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)
        if on_gpu
        else None,  # without the memory of graphs
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 1) if on_gpu else None,
        "published_peak_gb": work.peak_gb,
        "graph_breaks": graph_breaks() - breaks if arguments.compile else None,
        "waits": count_synchronizations(run.forward_and_backward),
        "loss": round(loss, 3),
        "ready_s": round(ready, 1),
    }


if __name__ == "__main__":
    main()
