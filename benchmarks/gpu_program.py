"""The process of a program of gpu.py: imports, waits for its turn, records the GPU's state before and after.

    python benchmarks/gpu_program.py CARD.json PROGRAM.py [options of the program …]

The turn starts with a line on standard input. The state of the GPU is written to CARD.json. With PREPARING in
the environment it fills the compilers' caches without timing, and uses at most PREPARING_GB of GPU memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_card


def record_card(card: dict[str, Any], when: str, path: Path) -> None:
    """Record the state of the GPU, with this process on it."""
    if not os.environ.get("PREPARING"):  # other programs run at the same time
        speed = gpu_card.copying_speed()
        card[when] = gpu_card.seen() | {"copies_tb_s": speed}
    path.write_text(json.dumps(card), encoding="utf-8")


def compile_only(begin_at: float) -> None:
    """Make Triton compile all variants of autotuned kernels without timing them.

    Processes that start at different positions of the list of variants need a fraction of the time, because
    they share the cache of compiled kernels.
    """
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    def once(kernel: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        kernel()
        return [1.0] * len(quantiles) if quantiles else 1.0

    variants = Autotuner.prune_configs

    def rotated(self: Any, settings: dict[str, Any]) -> list[Any]:
        found = list(variants(self, settings))
        first = int(begin_at * len(found))
        return found[first:] + found[:first]

    triton.testing.do_bench = once
    Autotuner.prune_configs = rotated


def keep_no_choices() -> None:
    """Prevent the compiler from saving its choice of kernel variants: timings beside other programs mislead.

    Variants are still chosen, but the result is not written. The compiler's own option against saving is
    written into generated code, so that users of cached code would not save choices either: code that is
    compiled again during capture must find a choice and must not benchmark.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    AutotuneCache.save = lambda *_, **__: None  # type: ignore[method-assign]  # stores no timings


def hold_back(gigabytes: float) -> None:
    """Limit the GPU memory: PyTorch frees its cache or raises an error."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))


def end_with(parent: int) -> None:
    """End this process with its parent, so that none outlives a killed run."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def import_first(program: str) -> None:
    """Import slow modules that need no GPU; without a GPU there are none."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import implicit_blocks.models.implicit  # noqa: F401  # for its side effect, as the next
    from implicit_blocks.ops import accelerated

    if Path(program).stem == "gpu_zoo":
        import trainer.run.build  # noqa: F401  # imported while Triton only compiles

        accelerated.report()  # a run records the versions of all packages, which loads them
    elif torch.cuda.is_available():
        for package in ("triton", "mamba-ssm", "causal-conv1d"):
            accelerated.load(accelerated.PACKAGES[package])
    if os.environ.get("PREPARING"):
        keep_no_choices()


def main() -> None:
    began = time.monotonic()
    preparing = os.environ.get("PREPARING")
    if not preparing and hasattr(os, "nice"):
        os.nice(10)  # preparing processes have priority
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    path, program = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    import_first(program)
    card: dict[str, Any] = {"imports_s": round(time.monotonic() - began, 1)}
    if not sys.stdin.readline():
        return  # no turn follows
    if preparing:
        hold_back(float(os.environ["PREPARING_GB"]))
        with contextlib.suppress(ImportError):  # Triton may be missing without a GPU
            compile_only(float(preparing))
    record_card(card, "begin", path)
    began = time.monotonic()
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        card["seconds"] = round(time.monotonic() - began, 1)
        record_card(card, "end", path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destroying graphs and modules takes seconds, for which the next program would wait


if __name__ == "__main__":
    main()
