"""Training throughput on one GPU: tokens per second, peak memory and iterations for models of the zoo.

    python benchmarks/gpu_training.py [--works llama_130m_bounded …] [--compile] [--graphs] [--as-published]

A *work* is a zoo model with a batch (see ``gpu_works.py``): the shapes at which the published implementation
was timed on an H100. Synthetic tokens; bfloat16 autocast, float32 master weights, fused AdamW. The time is
that of whole steps (forward, backward, clipping, optimizer): the median of ``--steps`` after warm-up, by CUDA
events. Model FLOPs are computed by ``implicit_blocks.models.counting`` from the iterations taken.
``--as-published`` takes the iterations of the published implementation, regardless of the residual. A row
also contains the number of graph breaks of the compiler (``graph_breaks``), the number of implicit
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
from typing import Any

import torch
from gpu_works import WORKS
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
        "--search-dtype", choices=["float8_e4m3fn"], default=None, help="8-bit floats in searches"
    )
    arguments = options.parse_args()
    rows = []
    for work in arguments.works:
        torch.compiler.reset()  # works share the layers' code, whose cache has eight entries
        try:
            rows.append(measure(work, arguments))
        except (RuntimeError, torch.OutOfMemoryError):
            rows.append({"work": work, "failed": traceback.format_exc(limit=3)})
        print(rows[-1], flush=True)
        keep(rows, arguments)  # after each row, so that a killed process keeps its results
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
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.ids = torch.randint(model.spec.vocab_size, (batch, length + 1), device=device())
        self.out: Any = None
        """The output of the last step."""

    def forward_and_backward(self) -> None:
        """Compute the loss and its gradients."""
        with bfloat16():
            self.out = self.model(self.ids[:, :-1], labels=self.ids[:, 1:], return_logits=False)
        self.out.loss.backward()

    def step(self) -> None:
        """Take a whole step: forward, backward, clipping, optimizer."""
        self.forward_and_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of a work."""
    began = time.perf_counter()
    work = WORKS[name]
    fixed = work.iterations if arguments.as_published else arguments.fixed
    changes = {} if fixed is None else {"stopping": ib.Stopping(tolerance=0.0, max_iterations=fixed)}
    model = model_of(
        work.spec,
        tiny=arguments.tiny,
        layers=arguments.layers,
        changes=changes,
        compiled=arguments.compile,
        graphs=arguments.graphs,
    )
    batch, length = (2, 32) if arguments.tiny else (work.rows, work.length)
    if arguments.search_dtype is not None:
        model.quantize_search(getattr(torch, arguments.search_dtype))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = graph_breaks()
    iterations = []
    run = Steps(model, batch, length)
    for _ in range(arguments.warm_up):
        run.step()
    synchronize()
    ready = time.perf_counter() - began
    times = []
    for _ in range(arguments.steps):
        times.append(seconds(run.step))
        if run.out.solution is not None:
            iterations.append(run.out.solution.iterations.float().mean().item())
    if not math.isfinite(loss := run.out.loss.item()):
        raise RuntimeError(f"the loss is {loss} after {arguments.warm_up + arguments.steps} steps")
    mean_iterations = statistics.mean(iterations) if iterations else None
    rate = batch * length / statistics.median(times)
    flops = training_flops_per_token(model.spec, length=length, iterations=mean_iterations)
    published = work.tokens_per_second
    return {
        "work": name,
        "search_dtype": arguments.search_dtype,
        "tokens_per_second": round(rate),
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
        "graph_breaks": graph_breaks() - before if arguments.compile else None,
        "waits": count_synchronizations(run.forward_and_backward),
        "loss": round(loss, 3),
        "ready_s": round(ready, 1),
    }


if __name__ == "__main__":
    main()
