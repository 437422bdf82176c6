"""The SSD scan in plain PyTorch on one CPU thread, compared with transformers' Mamba2; and its linear cost.

    python benchmarks/ssd_cpu.py [--quick]

Both are the scan operator alone, forward and backward to all five inputs, on the same tensors. In
transformers 5.23 the scan of the pure-torch path of ``Mamba2Mixer`` is the function ``mamba2_chunk_scan``. It
is called as by the mixer, except for the skip connection, the bias and the softplus of dt, which the mixer
fuses into it and we do not; and timed at the chunk size of its configuration, 256, and at 64, where it is
fastest. Rounds alternate between the candidates, each with one untimed call (memory freed by others is
allocated again) and one timed call; figures are medians over rounds. Times are processor time, which for one
thread equals wall time on an idle machine. Without transformers the comparison is skipped.

Linear cost: each length runs in a separate process, because the peak of resident memory never decreases. It
is measured relative to the memory after creating the inputs, so it includes outputs, gradients and
intermediates.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import machine, write
from torch import Tensor

from implicit_blocks.ops.ssd import ssd

Scan = Callable[..., Tensor]
WIDTHS_130M = {"H": 24, "P": 64, "N": 128}
WIDTHS_LAPTOP = {"H": 4, "P": 32, "N": 32}
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def make_inputs(batch: int, length: int, *, H: int, P: int, N: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    # x, B and C are slices of one tensor, as after a mixer's convolution.
    joint = torch.randn(batch, length, H * P + 2 * N, generator=generator)
    x, B, C = joint.split([H * P, N, N], dim=-1)
    dt = 1e-3 + 0.1 * torch.rand(batch, length, H, generator=generator)
    A = -1 - 15 * torch.rand(H, generator=generator)
    inputs = (x.unflatten(-1, (H, P)), dt, A, B[:, :, None], C[:, :, None])
    return [t.detach().requires_grad_() for t in inputs]


def ours(backend: str) -> Scan:
    def scan(*inputs: Tensor) -> Tensor:
        return ssd(*inputs, backend=backend)[0]

    return scan


def theirs(chunk_size: int) -> Scan | None:
    try:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    except ImportError:
        return None

    def scan(*inputs: Tensor) -> Tensor:
        y: Tensor = mamba2_chunk_scan(*inputs, chunk_size)
        return y

    return scan


def timed(scan: Scan, inputs: list[Tensor], dy: Tensor) -> dict[str, float]:
    start = time.process_time()
    y = scan(*inputs)
    middle = time.process_time()
    torch.autograd.grad(y, inputs, dy)
    end = time.process_time()
    with torch.no_grad():
        scan(*inputs)
    return {
        "forward": middle - start,
        "backward": end - middle,
        "both": end - start,
        "no_grad": time.process_time() - end,
    }


def compare(batch: int, length: int, widths: dict[str, int], rounds: int) -> dict[str, Any]:
    inputs = make_inputs(batch, length, **widths)
    dy = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    candidates: dict[str, Scan | None] = {
        "implicit_blocks": ours("torch"),
        "implicit_blocks, autograd": ours("chunked_autograd"),
        "transformers, chunk 256": theirs(256),
        "transformers, chunk 64": theirs(64),
    }
    present = {name: scan for name, scan in candidates.items() if scan is not None}
    results: dict[str, Any] = {}
    reference: list[Tensor] | None = None
    for name, scan in present.items():  # also serves as warm-up
        y = scan(*inputs)
        values = [y.detach(), *torch.autograd.grad(y, inputs, dy)]
        reference = values if reference is None else reference
        errors = [float((v - r).norm() / r.norm()) for v, r in zip(values, reference, strict=True)]
        results[name] = {"largest_relative_difference": max(errors)}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    for _ in range(rounds):
        for name, scan in present.items():
            timed(scan, inputs, dy)
            times[name].append(timed(scan, inputs, dy))
    for name, found in times.items():
        for part in found[0]:
            results[name][f"{part}_ms"] = round(1e3 * statistics.median(f[part] for f in found), 2)
        results[name]["both_ms_best"] = round(1e3 * min(f["both"] for f in found), 2)
    for name in results:
        results[name]["ratio_to_implicit_blocks"] = round(
            statistics.median(
                a["both"] / b["both"] for a, b in zip(times[name], times["implicit_blocks"], strict=True)
            ),
            2,
        )
    return {"B": batch, "L": length, **widths, "rounds": rounds, "candidates": results}


def resident_bytes(field: str) -> int:
    """Return VmRSS (current) or VmHWM (peak); the peak of getrusage would include the parent process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status; measuring memory requires Linux")


def measure_length(length: int) -> dict[str, float]:
    """Return time and peak memory at one length, in this process."""
    small = make_inputs(1, 64, **WIDTHS_130M)
    timed(ours("torch"), small, torch.ones_like(small[0]))  # loads libraries, starts thread pools
    inputs = make_inputs(1, length, **WIDTHS_130M)
    dy = torch.ones_like(inputs[0])
    before = resident_bytes("VmRSS")
    times = [timed(ours("torch"), inputs, dy)["both"] for _ in range(3)]
    return {
        "L": length,
        "microseconds_per_token": round(1e6 * statistics.median(times) / length, 2),
        "microseconds_per_token_best": round(1e6 * min(times) / length, 2),
        "peak_bytes_per_token": round((resident_bytes("VmHWM") - before) / length),
    }


def versions() -> dict[str, Any]:
    try:
        import transformers
    except ImportError:
        return machine()
    return {**machine(), "transformers": transformers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the SSD scan on one CPU thread.")
    parser.add_argument("--quick", action="store_true", help="three rounds, short lengths, no output file")
    parser.add_argument("--length", type=int, help="measure only this length; for internal use")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.length:
        print(json.dumps(measure_length(arguments.length)))
        return

    rounds = 3 if arguments.quick else 7
    shapes = ((1, 1024, WIDTHS_130M), (4, 1024, WIDTHS_130M), (128, 32, WIDTHS_LAPTOP))
    comparisons = [compare(batch, length, widths, rounds) for batch, length, widths in shapes]
    for found in comparisons:
        print("B={B} L={L} H={H} P={P} N={N}, {rounds} rounds, median ms".format(**found))
        print(f"  {'':28}{'forward':>9}{'backward':>9}{'both':>9}{'no grad':>9}{'ratio':>7}")
        for name, row in found["candidates"].items():
            print(
                f"  {name:28}{row['forward_ms']:9.1f}{row['backward_ms']:9.1f}{row['both_ms']:9.1f}"
                f"{row['no_grad_ms']:9.1f}{row['ratio_to_implicit_blocks']:7.1f}"
            )
    lengths = LENGTHS[:3] if arguments.quick else LENGTHS
    linearity = []
    print("L, µs per token (forward and backward), peak bytes per token; B=1, 130M widths")
    for length in lengths:
        command = [sys.executable, __file__, "--length", str(length)]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
        linearity.append(json.loads(child.stdout))
        row = linearity[-1]
        print(f"  {length:6}{row['microseconds_per_token']:9.1f}{row['peak_bytes_per_token']:9}")
    if not arguments.quick:
        result = {"machine": versions(), "threads": 1, "comparisons": comparisons, "linearity": linearity}
        print(f"written to {write('ssd_cpu', result)}")


if __name__ == "__main__":
    main()
