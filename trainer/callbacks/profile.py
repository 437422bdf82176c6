"""The callback ``profile``: traces some steps with torch's profiler."""

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
    """Traces ``steps`` steps from step ``start`` on, with torch's profiler, on every process.

    The traces are files such as ``profiles/steps-10-12.rank-0.json`` in the run's folder, which Perfetto and
    chrome://tracing open, each with a table of the longest operations. Tracing slows steps down, and a few
    steps suffice. Steps before the checkpoint of a resumed run are not traced.
    """

    def __init__(self, spec: ProfileSpec) -> None:
        self._first, self._last = spec.start, spec.start + spec.steps - 1
        self._profiler: torch.profiler.profile | None = None

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Start tracing if the next step is the first one to trace."""
        self._begin_before(step + 1, run)

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Start tracing before the first step to trace, stop after the last one."""
        if row["step"] == self._last:
            self._end(run, last=self._last)
        self._begin_before(row["step"] + 1, run)

    def on_end(self, run: CallbackContext, *, step: int, finished: bool) -> None:
        """Stop tracing if the run ends early; log a message if no step was traced."""
        self._end(run, last=step)
        if finished and step < self._first:
            run.log(f"no steps were traced: the run ended after step {step}, before step {self._first}")

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
        if last < self._first:  # it was started before a step that the run did not reach
            return
        folder = run.folder / "profiles"
        folder.mkdir(exist_ok=True)
        stem = f"steps-{self._first}-{last}.rank-{run.rank}"
        trace = folder / f"{stem}.json"
        trace.unlink(missing_ok=True)  # torch would follow a link
        profiler.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=50)
        write_atomically(folder / f"{stem}.txt", table)
        run.log(f"traced steps {self._first} to {last}: {folder / stem}.json")
