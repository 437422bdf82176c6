"""Time and error of every backend of scan, convolution and attention at the zoo's shapes, on a GPU.

    python benchmarks/backends.py

Times are medians of several calls between CUDA events, forward (without gradients) and forward with backward,
with a cold L2 cache. Errors are relative to the reference in float64, at a shorter length: the maximum over
output, final state and all gradients. A backend that fails is recorded as ``untested`` with the reason; one
that rejects the inputs as ``refused``.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from report import machine, write
from torch import Tensor

from implicit_blocks.ops.accelerated import load
from implicit_blocks.ops.attention import ATTENTION, attend, find_blocks
from implicit_blocks.ops.backends import Backend, Operation
from implicit_blocks.ops.causal_conv import CAUSAL_CONV, causal_conv
from implicit_blocks.ops.ssd import SSD, ssd

DEVICE = "cuda"
LONGEST = 40  # time limit in seconds per backend and shape
Work = tuple[Callable[[str], list[Tensor]], list[Tensor]]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE).requires_grad_(t.is_floating_point()) for t in tensors]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def scan(batch: int, length: int, heads: int, dtype: torch.dtype, *, state: bool) -> Work:
    width, states = 64, 128
    wide = torch.promote_types(dtype, torch.float32)
    dt = torch.rand(batch, length, heads, device=DEVICE, dtype=wide) * 0.1
    A = -1 - 15 * torch.rand(heads, device=DEVICE, dtype=wide)
    maps = [random(batch, length, 1, states, dtype=dtype) for _ in range(2)]
    inputs = leaves(random(batch, length, heads, width, dtype=dtype), dt, A, *maps)
    before = leaves(random(batch, heads, width, states, dtype=wide)) if state else []

    def run(backend: str) -> list[Tensor]:
        given = before[0] if state else None
        y, h = ssd(*inputs, initial_state_BHPN=given, return_final_state=True, backend=backend)
        assert h is not None
        return [y, h]

    return run, inputs + before


def convolution(batch: int, length: int, channels: int, dtype: torch.dtype) -> Work:
    inputs = leaves(random(batch, length, channels, dtype=dtype), *(random(channels, 4), random(channels)))

    def run(backend: str) -> list[Tensor]:
        x, weight, bias = inputs
        return [causal_conv(x, weight.to(dtype), bias.to(dtype), activation="silu", backend=backend)]

    return run, inputs


def attention(batch: int, heads: int, length: int, keys: int, dtype: torch.dtype, seen: str) -> Work:
    width = 64
    tensors = leaves(*(random(batch, heads, n, width, dtype=dtype) for n in (length, keys, keys)))
    place = torch.arange(keys, device=DEVICE)
    mask = None
    if seen == "documents":  # of unequal lengths, different in each row
        generator = torch.Generator(DEVICE).manual_seed(0)
        cuts = torch.rand(batch, keys, device=DEVICE, generator=generator) < 4 / keys
        documents = cuts.cumsum(1)
        mask = (place <= place[:, None]) & (documents[:, :, None] == documents[:, None, :])[:, None]
    elif seen == "band of 256":
        mask = (place <= place[:, None]) & (place > place[:, None] - 256)
    elif seen == "behind others":
        mask = place <= place[-length:, None]
    causal = seen in ("causal", "behind others")
    blocks: dict[str, Any] = {}

    def run(backend: str) -> list[Tensor]:
        if backend == "flex" and not blocks:  # once per window
            device = tensors[0].device
            blocks["found"] = find_blocks(mask, length=length, keys=keys, causal=causal, device=device)
        return [attend(*tensors, mask=mask, causal=causal, blocks=blocks.get("found"), backend=backend)]

    return run, tensors


def milliseconds(call: Callable[[], Any], *, rounds: int) -> float:
    cold = torch.empty(1 << 28, dtype=torch.int8, device=DEVICE)
    call()
    times: list[float] = []
    for _ in range(rounds):
        cold.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def forward(work: Work, backend: str) -> Any:
    with torch.no_grad():
        return work[0](backend)


def both(work: Work, backend: str) -> list[Tensor]:
    run, inputs = work
    outputs = run(backend)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(y.shape, device=DEVICE, generator=generator) for y in outputs]
    weights = [w.bfloat16().to(y.dtype) for w, y in zip(weights, outputs, strict=True)]
    found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [*outputs, *(g for g in found if g is not None)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(
        float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
        for a, b in pairs
    )


def in_float64(work: Work) -> list[Tensor]:
    """Return the rounded inputs of a work, in float64."""
    return [t.detach().double() for t in work[1]]


def worst_error(make: Callable[..., Work], oracle: str, backend: str) -> float:
    low, high = make(torch.bfloat16), make(torch.float64)
    with torch.no_grad():
        for t, exact in zip(high[1], in_float64(low), strict=True):
            t.copy_(exact)
    return error(both(low, backend), both(high, oracle))


class Case(NamedTuple):
    operation: Operation
    oracle: str
    make: Callable[[torch.dtype], Work]
    small: Callable[[torch.dtype], Work]
    gradients: bool = True


def attention_case(length: int, seen: str) -> Case:
    def make(dtype: torch.dtype) -> Work:
        return attention(8, 12, length, 2048, dtype, seen)

    def small(dtype: torch.dtype) -> Work:
        return attention(2, 3, min(length, 512), 512, dtype, seen)

    return Case(ATTENTION, "torch", make, small)


CASES = {
    "attention, causal, B8 H12 L2048 P64": attention_case(2048, "causal"),
    "attention, documents, B8 H12 L2048 P64": attention_case(2048, "documents"),
    "attention, band of 256, B8 H12 L2048 P64": attention_case(2048, "band of 256"),
    "attention, 256 behind 1792, B8 H12 P64": attention_case(256, "behind others"),
    "scan, B8 L2048 H24 P64 N128": Case(
        SSD,
        "torch",
        lambda dtype: scan(8, 2048, 24, dtype, state=False),
        lambda dtype: scan(2, 512, 4, dtype, state=False),
    ),
    "scan behind a state, B8 L256 H24 P64 N128": Case(
        SSD,
        "torch",
        lambda dtype: scan(8, 256, 24, dtype, state=True),
        lambda dtype: scan(2, 256, 4, dtype, state=True),
    ),
    "one token, B64 H64 P64 N128": Case(
        SSD,
        "recurrence",
        lambda dtype: scan(64, 1, 64, dtype, state=True),
        lambda dtype: scan(3, 1, 4, dtype, state=True),
        gradients=False,
    ),
    "convolution, B8 L2048 C1792": Case(
        CAUSAL_CONV,
        "torch",
        lambda dtype: convolution(8, 2048, 1792, dtype),
        lambda dtype: convolution(2, 300, 64, dtype),
    ),
}


def measure(case: Case, work: Work, backend: Backend, *, rounds: int) -> dict[str, Any]:
    if backend.module and isinstance(reason := load(backend.module), str):
        return {"untested": reason}
    found: dict[str, Any] = {}
    signal.alarm(LONGEST)
    try:
        found["forward_ms"] = milliseconds(lambda: forward(work, backend.name), rounds=rounds)
        if case.gradients:
            found["error"] = worst_error(case.small, case.oracle, backend.name)
            found["both_ms"] = milliseconds(lambda: both(work, backend.name), rounds=rounds)
    except ValueError as refusal:
        found["refused"] = str(refusal)
    except Exception as failure:  # any error of a package is recorded
        torch.cuda.empty_cache()
        found["untested"] = " ".join(str(failure).split())[:300]
    finally:
        signal.alarm(0)
    return found


def too_long(*_: Any) -> None:
    raise TimeoutError(f"took more than {LONGEST} s, including autotuning")


def line(row: dict[str, Any]) -> str:
    times = [f"{row[k]:9.3f}" if k in row else " " * 9 for k in ("forward_ms", "both_ms")]
    wrong = f"{row['error']:9.1e}" if "error" in row else ""
    why = [f" {status}: {row[status][:90]}" for status in ("untested", "refused") if status in row]
    return f"{row['work']:48} {row['backend']:14} {times[0]} {times[1]} {wrong}{''.join(why)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="output file (default: in benchmarks/results)")
    parser.add_argument("--only", default="", help="measure only cases whose names begin with this")
    parser.add_argument("--backends", nargs="+", help="measure only these backends")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark requires a CUDA GPU")
    print(f"{'':63} {'forward':>9} {'both':>9} {'error':>9}   (ms)")
    signal.signal(signal.SIGALRM, too_long)
    rows = []
    for name, case in CASES.items():
        if not name.startswith(options.only):
            continue
        work = case.make(torch.bfloat16)
        for backend in case.operation.backends:
            if backend.name in ("recurrence", "chunked_autograd"):
                continue
            if options.backends is not None and backend.name not in options.backends:
                continue
            began = time.perf_counter()
            row = {"work": name, "backend": backend.name}
            row |= measure(case, work, backend, rounds=options.rounds)
            rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
            print(line(row), flush=True)
            keep(rows, options)  # after each row, so that a killed process keeps its results


def keep(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    result = {"machine": machine(), "arguments": {"rounds": options.rounds}, "backends": rows}
    if options.json is None:
        write("backends", result)
    else:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
