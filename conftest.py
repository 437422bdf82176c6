"""Fixtures of the tests of the repository and of its plugins."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Imports and collected tests create many objects and little garbage: collect it rarely until they are done.
gc.set_threshold(200_000, 10, 10)

# The workers and the programs that the tests start share compiled modules, even where the environment turns
# this off, as many containers do: otherwise each compiles every module, and pytest rewrites every test.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and not among the modules and tests, which took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def _strict_torch() -> None:
    """Use one thread, fill uninitialized memory with NaN, and seed every test with 0."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # of a module's class
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # that function formats the stack for devices, which takes a millisecond
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _untuned_kernels() -> Iterator[None]:
    """Let autotuned kernels use the first configuration that runs: tuning takes long, values are equal."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    bench = autotuner._bench

    def bench_first(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        if getattr(self, "served", None) is self.nargs:  # another configuration ran in this call
            return [math.inf] * 3
        times: list[float] = bench(self, *arguments, config=config, **meta)
        if times[0] < math.inf:
            self.served = self.nargs
        return times

    def run_once(kernel: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        kernel()
        return [1.0] * len(quantiles) if quantiles else 1.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(autotuner, "_bench", bench_first)
        patched.setattr("triton.testing.do_bench", run_once)
        yield
