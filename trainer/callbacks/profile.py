"""The callback of kind ``profile``: what some steps spend their time on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from trainer.callbacks.base import Callback, CallbackContext
from trainer.specs.callbacks import ProfileSpec
from trainer.storage.files import write_atomically


class Profile(Callback):
    """Trace ``steps`` steps from step ``start`` on, with torch's profiler, on every process.

    The traces are ``profiles/steps-10-12.rank-0.json`` in the run's folder, to be opened in Perfetto or
    chrome://tracing; beside each stands a table of what took longest. A trace slows down its steps; a few are
    enough. Steps that a run skips over when it is resumed are not traced.
    """

    def __init__(self, spec: ProfileSpec) -> None:
        self._first, self._last = spec.start, spec.start + spec.steps - 1
        self._profiler: torch.profiler.profile | None = None

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Begin, where the first step to trace is the run's next one."""
        self._begin_before(step + 1, run)

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Begin before the first step, end after the last one."""
        if row["step"] == self._last:
            self._end(run, last=self._last)
        self._begin_before(row["step"] + 1, run)

    def on_end(self, run: CallbackContext, *, step: int, finished: bool) -> None:
        """End, where the run ends before the last step to trace; say so, where it ends before the first."""
        self._end(run, last=step)
        if finished and step < self._first:
            run.log(f"no steps were traced: the run ended at {step}, before step {self._first}")

    def _begin_before(self, step: int, run: CallbackContext) -> None:
        if step == self._first:
            activities = [ProfilerActivity.CPU]
            if run.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def _end(self, run: CallbackContext, *, last: int) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        if last < self._first:  # it was begun before a step that the run didn't make
            return
        folder = run.folder / "profiles"
        folder.mkdir(exist_ok=True)
        stem = f"steps-{self._first}-{last}.rank-{run.rank}"
        trace = folder / f"{stem}.json"
        trace.unlink(missing_ok=True)  # torch would write through a link
        profiler.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=50)
        write_atomically(folder / f"{stem}.txt", table)
        run.log(f"traced steps {self._first} to {last}: {folder / stem}.json")
