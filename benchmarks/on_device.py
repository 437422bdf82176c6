"""Helpers of the GPU benchmarks: device, timing, models, and rows of results.

Without a GPU everything runs on the CPU with the sizes of ``--tiny``: to test the programs, not to measure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from report import machine
from torch._dynamo.utils import counters

import implicit_blocks as ib

CARD = 770e12  # measured FLOP/s of bfloat16 matrix products on an H100, the reference of shares


def device() -> torch.device:
    """Return the GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs."""
    command = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    command.add_argument("--json", type=Path, default=None, help="write the rows to this file")
    command.add_argument("--tiny", action="store_true", help="small models and batches, to test the program")
    command.add_argument(
        "--layers", type=int, default=None, help="maximum number of layers, to fill the compilers' caches"
    )
    return command


def keep(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the rows and the machine to the file of ``--json``."""
    if arguments.json is not None:
        given = {name: value for name, value in vars(arguments).items() if name != "json"}
        text = json.dumps({"machine": machine(), "arguments": given, "rows": rows}, indent=1, default=str)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any]) -> float:
    """Return the duration of a call by the clock of the GPU, or of the host without a GPU."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


def alternately(runs: dict[str, Callable[[], Any]], *, repeats: int, warm_up: int) -> dict[str, float]:
    """Time calls in turn, so that disturbances affect all equally; return the medians."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + warm_up):
        for name, run in runs.items():
            took = seconds(run)
            if repeat >= warm_up:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def bfloat16() -> Iterator[None]:
    """Compute in bfloat16 on the device, by autocast."""
    with torch.autocast(device().type, dtype=torch.bfloat16):
        yield


def smaller(spec: Any) -> Any:
    """Return a small spec of the same kinds."""
    tree = spec.model_dump()
    tree |= {"vocab_size": 61, "d_model": 32, "n_layers": 2}
    kind = tree["mixer"]["kind"]
    tree["mixer"] |= {"n_heads": 4, "n_kv_heads": None} if kind == "attention" else {"head_dim": 16}
    if tree.get("mlp"):
        tree["mlp"] |= {"d_ff": 64}
    return type(spec).model_validate(tree)


def model_of(
    name: str, *, tiny: bool = False, layers: int | None = None, changes: dict[str, Any] | None = None,
    compiled: bool = False, graphs: bool = False,
) -> Any:  # fmt: skip
    """Build a model of the zoo on the device, seed 0, in training mode; compiled only on a GPU."""
    spec: Any = ib.load_spec(name).model
    spec = smaller(spec) if tiny else spec
    fewer = {} if layers is None else {"n_layers": min(layers, spec.n_layers)}
    spec = spec.model_copy(update=(changes or {}) | fewer)
    torch.manual_seed(0)
    with device():
        model = ib.build(spec).train()
    if compiled and torch.cuda.is_available():  # testing a program should not take minutes of compilation
        model.compile_layers()
    if graphs:
        model.capture_graphs()
    return model


def count_synchronizations(run: Callable[[], Any]) -> int | None:
    """Return the number of implicit synchronizations of a call; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def graph_breaks() -> int:
    """Return the number of graph breaks since the process started."""
    return sum(counters["graph_break"].values())
