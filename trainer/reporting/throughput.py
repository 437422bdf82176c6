"""What a run can tell of its own speed, beside its metrics: operations, utilization, memory, by phase."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer.estimate.flops import TrainingFlops, training_flops
from trainer.estimate.peak_flops import peak_flops
from trainer.reporting.display import counted, duration, magnitude
from trainer.reporting.metrics import rounded
from trainer.run.step import PERCENTILES, StepResult
from trainer.specs.run import Phase


class ThroughputMeter:
    """Counts the operations of steps, and what share they are of what the devices could do.

    A multiply-add counts 2. ``mfu`` (model FLOPs utilization) counts what the mathematics asks for: each
    sequence's own iterations. ``hfu`` (hardware FLOPs utilization) counts what the devices are given:
    sequences that wait in the batch for others, and activations computed twice. Both are None where the
    model doesn't tell its cost, or the device's peak is neither known nor given (`training.peak_flops`).

    Args:
        devices: how many take part.
        device: this process's.
        peak: FLOP/s of one device; None: looked up by its name.

    """

    def __init__(self, *, devices: int, device: torch.device, peak: float | None) -> None:
        self._devices = devices
        self._device = device
        self._peak = peak
        self._name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def row(self, result: StepResult, *, phase: Phase, tokens: int, seconds: float) -> dict[str, Any]:
        """Return the columns of a step of ``tokens`` tokens: nothing is read from the device."""
        flops = self._flops(result, phase)
        peak = self._peak or peak_flops(self._name, phase.training.precision)
        per_device = tokens / seconds / self._devices
        utilization: dict[str, Any] = dict.fromkeys(("tflops", "tflops_executed", "mfu", "hfu"))
        if flops is not None:
            useful, executed = (amount * per_device for amount in flops)
            utilization |= {
                "tflops": rounded(useful / 1e12, 4),
                "tflops_executed": rounded(executed / 1e12, 4),
            }
            if peak is not None:
                utilization |= {"mfu": rounded(useful / peak, 4), "hfu": rounded(executed / peak, 4)}
        return {**utilization, **self._memory()}

    def _flops(self, result: StepResult, phase: Phase) -> TrainingFlops | None:
        return training_flops(
            phase.model,
            length=phase.data.seq_len,
            iterations=None if result.search is None else result.search.iterations,
            iterations_executed=result.iterations_executed,
            checkpoint_activations=phase.training.checkpoint_activations,
        )

    def _memory(self) -> dict[str, float | None]:
        """Return the most memory (10^9 bytes) held since the last call, on the CPU since the start.

        On a GPU ``memory_gb`` is what the allocator reserved, and ``memory_allocated_gb`` what of it tensors
        took, which leaves out what CUDA graphs keep. On the CPU the process is all there is to ask.
        """
        if self._device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self._device)
            allocated = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return {
                "memory_gb": rounded(reserved / 1e9, 4),
                "memory_allocated_gb": rounded(allocated / 1e9, 4),
            }
        try:
            import resource
        except ImportError:  # not on Windows
            return {"memory_gb": None, "memory_allocated_gb": None}
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"memory_gb": rounded(most / 1e9, 4), "memory_allocated_gb": None}


_AVERAGED = (
    "iterations",
    "iterations_p50",
    "iterations_p90",
    "iterations_p99",
    "residual",
    "residual_p50",
    "residual_p90",
    "residual_p99",
    "non_converged",
    "diverged",
    "gradient_norm",
    "tflops",
    "tflops_executed",
    "mfu",
    "hfu",
)
_LARGEST = ("iterations_max", "residual_max", "memory_gb", "memory_allocated_gb")

REQUIRED = ("phase", "loss", "step_seconds", "tokens_per_second")
"""What :func:`by_phase` needs of every row."""
NUMBERS = (*_AVERAGED, *_LARGEST, *REQUIRED[1:], "save_stall_seconds")
"""What of a row :func:`by_phase` computes with."""


def by_phase(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sum up a run's rows of metrics for each of its phases, in order; none of them is kept.

    Averages are over steps, ``tokens_per_second`` over time; a quantity that no row of a phase has is None.
    """
    phases: dict[str, _PhaseSums] = {}
    for row in rows:
        phases.setdefault(row["phase"], _PhaseSums()).add(row)
    return {name: sums.summary() for name, sums in phases.items()}


class _PhaseSums:
    """What a phase's rows come to, as they go by."""

    def __init__(self) -> None:
        self._steps = self._skipped = 0
        self._seconds = self._tokens = self._stalled = 0.0
        self._losses: tuple[float | None, float | None] = None, None
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._largest: dict[str, float] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row along."""
        self._losses = row["loss"] if self._steps == 0 else self._losses[0], row["loss"]
        self._steps += 1
        self._skipped += row.get("skipped") is not None
        seconds = row["step_seconds"] or 0.0
        self._seconds += seconds
        self._tokens += (row["tokens_per_second"] or 0.0) * seconds
        self._stalled += row.get("save_stall_seconds") or 0.0  # those of older versions don't tell
        for key in _AVERAGED:
            if (value := row.get(key)) is not None:
                self._sums[key] = self._sums.get(key, 0.0) + value
                self._counts[key] = self._counts.get(key, 0) + 1
        for key in _LARGEST:
            if (value := row.get(key)) is not None:
                self._largest[key] = max(value, self._largest.get(key, value))

    def summary(self) -> dict[str, Any]:
        """Return what they come to."""
        rate = round(self._tokens / self._seconds, 1) if self._seconds > 0 else None
        return {
            "steps": self._steps,
            "seconds": round(self._seconds, 2),
            "tokens": round(self._tokens),
            "tokens_per_second": rate,
            "loss_first": self._losses[0],
            "loss_last": self._losses[1],
            "skipped": self._skipped,
            "save_stall_seconds": round(self._stalled, 3),
            **{
                key: rounded(self._sums[key] / self._counts[key]) if key in self._sums else None
                for key in _AVERAGED
            },
            **{key: self._largest.get(key) for key in _LARGEST},
        }


def in_words(name: str, measured: Mapping[str, Any]) -> str:
    """Return a phase's measurements (of :func:`by_phase`) as a line."""
    parts = [f"phase {name}: {counted(measured['steps'], 'step')} in {duration(measured['seconds'])}"]
    if measured["tokens_per_second"] is not None:
        parts.append(f"{magnitude(measured['tokens_per_second'])} tok/s")
    if measured["mfu"] is not None:
        parts.append(f"mfu {measured['mfu']:.1%} (executed {measured['hfu']:.1%})")
    if measured["memory_gb"] is not None:
        parts.append(f"{measured['memory_gb']:.1f} GB")
    if measured["iterations"] is not None:
        parts.append(f"iter {measured['iterations']:.1f}, at most {measured['iterations_max']}")
    if measured["residual_p50"] is not None:
        percentiles = ", ".join(f"{measured[f'residual_p{percent}']:.1e}" for percent in PERCENTILES)
        parts.append(f"res p{'/'.join(map(str, PERCENTILES))} {percentiles}")
    if measured["non_converged"] is not None:
        parts.append(f"open {measured['non_converged']:.1%}")
    if measured["gradient_norm"] is not None:
        parts.append(f"|g| {measured['gradient_norm']:.2f}")
    if measured["skipped"]:
        parts.append(f"{measured['skipped']} skipped")
    return "  ".join(parts)
