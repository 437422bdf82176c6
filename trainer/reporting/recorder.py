"""The row of metrics of each training step, with speed, utilization and memory: computed, written, shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from implicit_blocks.search.convergence_watch import adjoint_watch, expects_convergence, search_watch
from trainer.checkpoint.folder import TrainingProgress
from trainer.distributed import Ranks
from trainer.errors import FailedRecordError
from trainer.estimate.flops import StepCost
from trainer.estimate.peak_flops import peak_flops
from trainer.reporting.display import Display
from trainer.reporting.metrics import epoch_row, rounded
from trainer.run.step import StepResult, adjoint_row, search_row
from trainer.run.trainable_model import SearchesFixedPoints
from trainer.specs.run import Phase
from trainer.storage.run_folder import RunFolder


class StepRecorder:
    """Writes each step's row of metrics to the run's folder, shows it, and warns of unconverged searches.

    Every rank has a recorder and calls it at the same steps; rank 0 writes.

    Args:
        folder: of the run.
        meter: measures speed, utilization and memory.
        display: shows the rows and the warnings.
        ranks: the processes.
        stop_on_failure: whether the run ends if its metrics cannot be written.

    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        meter: ThroughputMeter,
        display: Display,
        ranks: Ranks,
        stop_on_failure: bool,
    ) -> None:
        self._folder = folder
        self._meter = meter
        self._display = display
        self._ranks = ranks
        self._stop_on_failure = stop_on_failure
        self._warned_unwritten = False
        self._search_watch, self._adjoint_watch = search_watch(), adjoint_watch()
        self._expects_convergence = False
        self.last_row: dict[str, Any] = folder.metrics.last_row() or {}
        """The row of the latest step; empty before the first one."""

    def enter_phase(self, phase: Phase, model: nn.Module) -> None:
        """Prepare for the steps of ``phase``, for which ``model`` is already configured."""
        self._meter.enter_phase(phase)
        self._expects_convergence = isinstance(model, SearchesFixedPoints) and expects_convergence(
            searches=model.gradient.searches,
            tolerance=model.stopping.tolerance,
            max_iterations=model.stopping.max_iterations,
        )

    def record(
        self,
        result: StepResult,
        *,
        progress: TrainingProgress,
        learning_rate: float,
        epochs: Mapping[str, float],
        tokens: int,
        step_seconds: float,
        stall_seconds: float,
    ) -> None:
        """Write and show the row of the step that ended at ``progress``.

        Args:
            result: measurements of the step.
            progress: of the run, after the step.
            learning_rate: of the update.
            epochs: passes over the data so far, by the names of its parts.
            tokens: in the step, over all ranks.
            step_seconds: duration of the step.
            stall_seconds: for which saves have stalled training since the last row.

        """
        self.last_row = {
            "step": progress.step,
            "phase": progress.phase,
            # Losses and norms are not rounded, so that the metrics of two runs can be compared bit by bit.
            "loss": result.loss,
            "accuracy": result.accuracy,
            "accuracy_last": result.accuracy_last,
            "learning_rate": learning_rate,
            "gradient_norm": result.gradient_norm,
            "skipped": result.not_finite,
            **search_row(result.search),
            **adjoint_row(result.adjoint),
            "tokens": progress.tokens,
            **epoch_row(epochs),
            "samples": progress.samples,
            "tokens_per_second": round(tokens / step_seconds, 1),
            **self._meter.row(result, tokens=tokens, seconds=step_seconds),
            "step_seconds": round(step_seconds, 4),
            "save_stall_seconds": round(stall_seconds, 4),
            "seconds": round(progress.seconds, 3),
        }
        self.write(self.last_row)
        self._display.step(self.last_row)
        self._warn_of_unconverged(result)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row to the metrics; log one warning if that fails and the run continues."""
        if not self._ranks.is_main:
            return
        self._folder.metrics.write(row)
        trouble = self._unwritten
        if trouble is not None and not self._warned_unwritten and not self._stop_on_failure:
            self._display.log(
                f"WARNING: the metrics can't be written ({trouble}); they are kept in memory until they can"
            )
        self._warned_unwritten = trouble is not None

    @property
    def must_stop(self) -> bool:
        """Whether metrics of this process cannot be written and the run has to end for it."""
        return self._stop_on_failure and self._unwritten is not None

    def require_written(self, step: int) -> None:
        """Raise on every rank if rank 0 cannot write its metrics and the run has to end for it.

        Raises:
            FailedRecordError: on rank 0; a PeerError on the other ranks.

        """

        def require_own() -> None:
            if self.must_stop:
                raise FailedRecordError(step=step, reason=str(self._unwritten))

        self._ranks.run_all(require_own)

    @property
    def _unwritten(self) -> OSError | None:
        return self._folder.metrics.trouble or self._folder.evaluations.trouble

    def _warn_of_unconverged(self, result: StepResult) -> None:
        for watch, solves in (
            (self._search_watch, result.search if self._expects_convergence else None),
            (self._adjoint_watch, result.adjoint),
        ):
            if solves is not None and (message := watch.add(solves.non_converged)) is not None:
                self._display.log(f"WARNING: {message}")


class ThroughputMeter:
    """Computes FLOP/s, utilization and memory of the steps of a phase.

    A multiply-add counts as 2 FLOPs. ``mfu`` (model FLOPs utilization) counts the iterations that each
    sequence needs. ``hfu`` (hardware FLOPs utilization) counts what the devices execute, which includes
    converged sequences that are still in the batch and recomputed activations. Both are None if the cost of
    the model is unknown, or if the peak of the device is neither known nor given (`training.peak_flops`).

    Args:
        devices: number of devices of the run.
        device: of this process.
        peak: FLOP/s of one device; None: looked up by the device's name.

    """

    def __init__(self, *, devices: int, device: torch.device, peak: float | None) -> None:
        self._devices = devices
        self._device = device
        self._given_peak = peak
        self._name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._cost: StepCost | None = None
        self._peak: float | None = None

    def enter_phase(self, phase: Phase) -> None:
        """Compute the cost of a step and the peak of the device, which are constant in a phase."""
        self._cost = StepCost.of(
            phase.model,
            length=phase.data.seq_len,
            checkpoint_activations=phase.training.checkpoint_activations,
        )
        self._peak = self._given_peak or peak_flops(self._name, phase.training.precision)

    def row(self, result: StepResult, *, tokens: int, seconds: float) -> dict[str, Any]:
        """Return the columns of a step of ``tokens`` tokens, without a device synchronization."""
        per_device = tokens / seconds / self._devices
        utilization: dict[str, Any] = dict.fromkeys(("tflops", "tflops_executed", "mfu", "hfu"))
        if self._cost is not None:
            iterations = 0.0 if result.search is None else result.search.iterations
            flops = self._cost.flops(iterations, result.iterations_executed)
            useful, executed = flops.useful * per_device, flops.executed * per_device
            utilization |= {
                "tflops": rounded(useful / 1e12, 4),
                "tflops_executed": rounded(executed / 1e12, 4),
            }
            if self._peak is not None:
                utilization |= {
                    "mfu": rounded(useful / self._peak, 4),
                    "hfu": rounded(executed / self._peak, 4),
                }
        return {**utilization, **self._memory()}

    def _memory(self) -> dict[str, float | None]:
        """Return the peak memory (10^9 bytes) since the last call; on the CPU since the process started.

        On a GPU ``memory_gb`` is reserved by the allocator and ``memory_allocated_gb`` is in tensors, without
        the private pools of CUDA graphs. On the CPU ``memory_gb`` is the resident memory of the process.
        """
        if self._device.type == "cuda":
            found = torch.cuda.memory_stats_as_nested_dict(self._device)  # flattening it takes a millisecond
            torch.cuda.reset_peak_memory_stats(self._device)
            return {
                "memory_gb": rounded(found["reserved_bytes"]["all"]["peak"] / 1e9, 4),
                "memory_allocated_gb": rounded(found["allocated_bytes"]["all"]["peak"] / 1e9, 4),
            }
        try:
            import resource
        except ImportError:  # Windows
            return {"memory_gb": None, "memory_allocated_gb": None}
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"memory_gb": rounded(most / 1e9, 4), "memory_allocated_gb": None}
