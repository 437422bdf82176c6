"""The state of the GPU: other processes, used memory, copy bandwidth."""

from __future__ import annotations

import math
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

QUIET_GB = 1.5  # memory that a driver may use itself
# Threshold relative to the highest copy bandwidth of a run; below it the GPU was shared. Memory that a
# program has just freed, in pieces, copies at 0.86 of it on an idle H100; beside another training run, 0.67.
SLOWER = 0.8


def query_gpu(*words: str) -> list[list[str]]:
    """Return the output of nvidia-smi for the visible GPU; empty without a GPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={first}", "--format=csv,noheader,nounits", *words]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in found.stdout.splitlines() if line.strip()]


def number(text: str) -> float | None:
    """Return a number in the output of nvidia-smi, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def seen() -> dict[str, Any]:
    """Return processes with a context on the GPU, memory, clock, and temperature."""
    queries = (
        "--query-gpu=memory.used,utilization.gpu,clocks.sm,temperature.gpu,power.draw",
        "--query-compute-apps=pid",
    )
    with ThreadPoolExecutor() as pool:  # each call takes a third of a second
        state, processes = pool.map(query_gpu, queries)
    if not state:
        return {}
    names = ("memory_used_gb", "busy_percent", "clock_mhz", "celsius", "watt")
    found: dict[str, Any] = dict(zip(names, map(number, state[0]), strict=True))
    used = found["memory_used_gb"]
    found["memory_used_gb"] = None if used is None else round(used / 1000 * 1.048576, 2)
    found["processes"] = len(processes)
    return found


def free_gb() -> float:
    """Return 90 % of the free memory; infinite without a GPU."""
    state = query_gpu("--query-gpu=memory.free")
    free = number(state[0][0]) if state else None
    return math.inf if free is None else 0.9 * free / 1000 * 1.048576


def once_quiet(patience: float) -> dict[str, Any]:
    """Return the GPU's state once it is unused; a process may take a moment to end."""
    end = time.monotonic() + patience
    while True:
        state = seen()
        if not unquiet(state) or time.monotonic() > end:
            return state
        time.sleep(0.3)


def unquiet(state: dict[str, Any], own: int = 0) -> str:
    """Describe the use of the GPU by others than ``own`` processes of this run, or return ""."""
    others = state.get("processes", 0) - own
    if others > 0:
        return f"{others} other process{'es' if others > 1 else ''}"
    if not own and (state.get("memory_used_gb") or 0) > QUIET_GB:
        return f"{state['memory_used_gb']} GB used"
    return ""


def copying_speed() -> float | None:
    """Return the copy bandwidth (read and write) in TB/s; None without a GPU or free memory."""
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    try:
        source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return round(20 * 2 * source.nbytes / (milliseconds * 1e9), 3)


def disturbances(card: dict[str, Any], fastest: float | None) -> list[str]:
    """Return signs of other work on the GPU before, during and after a program."""
    found = []
    for when, own in (("before", 0), ("begin", 1), ("end", 1), ("after", 0)):
        state = card.get(when) or {}
        if reason := unquiet(state, own):
            found.append(f"{when}: {reason}")
        speed = state.get("copies_tb_s")
        if speed is not None and fastest is not None and speed < SLOWER * fastest:
            found.append(f"{when}: copy bandwidth {speed:.2f} TB/s, up to {fastest:.2f} at other times")
    return found
