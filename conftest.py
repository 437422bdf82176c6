"""What the tests here and those of the plugins share."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _untuned_kernels() -> Iterator[None]:
    """Let tuned kernels take the first variant that runs: tests are of values, and compiling takes long."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    bench = autotuner._bench

    def first(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        if getattr(self, "served", None) is self.nargs:  # in this call another one ran
            return [math.inf] * 3
        took: list[float] = bench(self, *arguments, config=config, **meta)
        if took[0] < math.inf:
            self.served = self.nargs
        return took

    def once(kernel: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        kernel()
        return [1.0] * len(quantiles) if quantiles else 1.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(autotuner, "_bench", first)
        patched.setattr("triton.testing.do_bench", once)
        yield
