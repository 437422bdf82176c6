"""A program of gpu.py in its process: imports first, waits for its turn, looks at the card before and after.

    python benchmarks/gpu_program.py CARD.json PROGRAM.py [what the program takes …]

The turn is a line on standard input. What is seen of the card goes to CARD.json. With PREPARING in the
environment it fills the compilers' caches, times nothing, and takes no more than PREPARING_GB of the card.
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


def look(card: dict[str, Any], when: str, path: Path) -> None:
    """Write down the state of the card, this process on it."""
    if not os.environ.get("PREPARING"):  # others are at work then
        speed = gpu_card.copying_speed()
        card[when] = gpu_card.seen() | {"copies_tb_s": speed}
    path.write_text(json.dumps(card), encoding="utf-8")


def compile_only(begin_at: float) -> None:
    """Have Triton compile all variants of the kernels that it tunes, and time none.

    Processes that begin with other variants, at other parts of the list, need a fraction of the time: the
    cache of compiled kernels is theirs together.
    """
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    def once(kernel: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        kernel()
        return [1.0] * len(quantiles) if quantiles else 1.0

    variants = Autotuner.prune_configs

    def rotated(self: Any, given: dict[str, Any]) -> list[Any]:
        found = list(variants(self, given))
        first = int(begin_at * len(found))
        return found[first:] + found[:first]

    triton.testing.do_bench = once
    Autotuner.prune_configs = rotated


def keep_no_choices() -> None:
    """Let the compiler keep no choice among a kernel's variants: what is fastest beside others misleads.

    The choosing goes on and its result isn't written. Told not to keep them at all, the compiler writes that
    into the code it generates, and who takes the code from the cache keeps none either: what is compiled once
    more, while it is recorded, must find the choice made and not try.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    AutotuneCache.save = lambda *_, **__: None  # type: ignore[method-assign]


def hold_back(gigabytes: float) -> None:
    """Take no more of the card's memory than that: PyTorch gives back what it keeps, or fails."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))


def end_with(parent: int) -> None:
    """End this process with the one that started it, so that none outlives a run that is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def import_first(program: str) -> None:
    """Import what takes seconds and no GPU; without one there is nothing of that to load."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import implicit_blocks.models.implicit  # noqa: F401  # for its own sake, as the next one
    from implicit_blocks.ops import accelerated

    if Path(program).stem == "gpu_zoo":
        import trainer.run.build  # noqa: F401

        accelerated.report()  # a run notes the versions of all packages, and loads them for it
    elif torch.cuda.is_available():
        for package in ("triton", "mamba-ssm", "causal-conv1d"):
            accelerated.load(accelerated.PACKAGES[package])
    if os.environ.get("PREPARING"):
        keep_no_choices()


def main() -> None:
    began = time.monotonic()
    preparing = os.environ.get("PREPARING")
    if not preparing and hasattr(os, "nice"):
        os.nice(10)  # those that prepare go first; in its turn it is alone
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    path, program = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    import_first(program)
    card: dict[str, Any] = {"imports_s": round(time.monotonic() - began, 1)}
    if not sys.stdin.readline():
        return  # there will be no turn
    if preparing:
        hold_back(float(os.environ["PREPARING_GB"]))
        with contextlib.suppress(ImportError):  # without a GPU there is no Triton
            compile_only(float(preparing))
    look(card, "begin", path)
    began = time.monotonic()
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        card["seconds"] = round(time.monotonic() - began, 1)
        look(card, "end", path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking graphs and modules apart takes seconds, and the next one waits for them


if __name__ == "__main__":
    main()
