"""Overhead of the search loop over the bare map on a GPU: time, operator calls and kernels per iteration.

    python benchmarks/gpu_driver.py [--models llama_130m mamba2_130m] [--iterations 8] [--compile] [--graphs]

The map is that of the zoo's 130M models with random weights at 8 × 2048 tokens, bfloat16 autocast, iterated a
fixed number of times (tolerance 0) by a loop over ``f`` and by ``Search`` with Picard, for both scopes, with
the statistics of its ``Solution`` and the residual of every call (``trace``). They run in turn; medians are
compared. Operator calls are those that PyTorch dispatches between two calls of the map (Triton kernels are
not counted); the profiler counts kernels and copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from on_device import alternately, bfloat16, device, keep, model_of, parser, synchronize
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

import implicit_blocks as ib
from implicit_blocks.models.stack import BoundMap

MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"graphs": True},
    "compiled+graphs": {"compiled": True, "graphs": True},
}


class OperatorCalls(TorchDispatchMode):
    """Counts the operators called between two calls of a map."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.counts: list[int] = []
        self._inside = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if self.counts and not self._inside:
            self.counts[-1] += 1
        return function(*arguments, **(keywords or {}))

    def around(self, f: BoundMap) -> Callable[[Tensor], Tensor]:
        """Return the map with counting around it."""

        def counted(z: Tensor) -> Tensor:
            self._inside = True
            fz = f(z)
            self._inside = False
            self.counts.append(0)
            return fz

        return counted


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=["llama_130m", "mamba2_130m"])
    options.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    options.add_argument("--iterations", type=int, default=8)
    options.add_argument("--repeats", type=int, default=9)
    arguments = options.parse_args()
    rows = []
    for name in arguments.models:
        for mode in arguments.modes:
            rows.append(measure(name, mode, arguments))
            print(rows[-1], flush=True)
            keep(rows, arguments)
            torch.compiler.reset()


@torch.no_grad()
def measure(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare a search with a bare loop."""
    model = model_of(name, tiny=arguments.tiny, layers=arguments.layers, **MODES[mode])
    batch, length = (2, 32) if arguments.tiny else (8, 2048)
    ids = torch.randint(model.spec.vocab_size, (batch, length), device=device())
    n = arguments.iterations
    with bfloat16():
        f, start = model.bind(model.embedding(ids), model.initial_state(batch), weights=model.cache_weights())

        def bare() -> None:
            z = start
            for _ in range(n):
                z = f(z)

        def search(scope: str) -> ib.Search:
            stopping = ib.Stopping(tolerance=0.0, max_iterations=n, scope=scope)  # type: ignore[arg-type]  # as a literal
            return ib.Search(solver=ib.Picard(), stopping=stopping, trace=True)

        def driven(scope: str) -> Callable[[], Any]:
            return lambda: search(scope)(f, start)

        runs = {"bare": bare, "sequence": driven("sequence"), "prefix": driven("prefix")}
        times = alternately(runs, repeats=arguments.repeats, warm_up=3)
        calls = {scope: operator_calls(f, start, search(scope)) for scope in ("sequence", "prefix")}
        kernels = {key: count_launches(run) for key, run in runs.items()}
    row: dict[str, Any] = {"model": name, "map": mode, "ms_per_iteration": round(1000 * times["bare"] / n, 4)}
    for scope in ("sequence", "prefix"):
        row[f"overhead_{scope}_percent"] = round(100 * (times[scope] / times["bare"] - 1), 2)
        row[f"operator_calls_{scope}"] = calls[scope]
        counted = (kernels[scope], kernels["bare"])
        row[f"kernels_{scope}"] = (
            None if None in counted else round((counted[0] - counted[1]) / n, 1)  # type: ignore[operator]  # neither is None
        )
    return row


def operator_calls(f: BoundMap, start: Tensor, search: ib.Search) -> int:
    """Return the maximum number of operators that an iteration of a search calls besides the map's own.

    The last iteration is excluded, because the report follows it.
    """
    calls = OperatorCalls()
    with calls:
        search(calls.around(f), start)
    return max(calls.counts[:-1])


def count_launches(run: Callable[[], Any]) -> int | None:
    """Return the number of kernels and copies launched by a call; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    run()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize()
    return sum(bool(event.device_type == DeviceType.CUDA) for event in profile.events())


if __name__ == "__main__":
    main()
