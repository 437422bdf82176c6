"""The live view of runs: ``implicit-blocks report --watch runs``. Reads the runs' files; imports no torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_blocks.specs import SpecError, load_spec
from trainer.errors import RunFolderError
from trainer.reporting.display import Pace, duration, magnitude
from trainer.reporting.metrics import MetricsFile
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 24
"""Width of a loss curve in characters."""
_SILENT_STEPS, _SILENT_SECONDS = 20.0, 60.0
"""A run is silent after this many of its steps, and at least this many seconds, without a new row."""


class WatchedRun:
    """The state of a run in its folder; ``refresh`` reads what has been written since the last call.

    Args:
        path: the run's folder.
        now: the time in seconds, to which the time of the last row is compared.

    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.folder = RunFolder(path)
        self.row: dict[str, Any] = {}
        """The row of the latest step; empty before the first one."""
        self.evaluation: dict[str, Any] = {}
        """The first set's row of the latest evaluation; empty before the first one."""
        self.losses: list[float] = []
        self._now = now
        self._position = 0
        self._spec: RunSpec | None = None
        self._pace: Pace | None = None

    @property
    def spec(self) -> RunSpec | None:
        """The spec of the run; None if it cannot be read."""
        if self._spec is None and self.folder.spec_path.is_file():
            with suppress(SpecError):
                spec = load_spec(self.folder.spec_path)
                self._spec = spec if isinstance(spec, RunSpec) else None
        return self._spec

    @property
    def total(self) -> int | None:
        """The number of steps of the run; None if its spec cannot be read."""
        return None if self.spec is None else self.spec.total_steps

    @property
    def is_finished(self) -> bool:
        """Whether the run has its summary."""
        return self.folder.summary_path.is_file()

    @property
    def state(self) -> str:
        """``finished``, ``no steps yet``, ``silent 5m00s``, or the remaining time."""
        if self.is_finished:
            return "finished"
        if not self.row:
            return "no steps yet"
        silent = self._now() - self.folder.metrics.path.stat().st_mtime
        if silent > max(_SILENT_SECONDS, _SILENT_STEPS * float(self.row.get("step_seconds") or 0.0)):
            return f"silent {duration(silent)}"
        left = None if self._pace is None else self._pace.remaining(self.row)
        return "training" if left is None else f"ETA {duration(left)}"

    def refresh(self) -> None:
        """Read the new rows."""
        path = self.folder.metrics.path
        if not path.is_file():
            return
        if path.stat().st_size < self._position:  # the run was resumed from an earlier checkpoint
            self.losses, self._position, self._pace = [], 0, None
        with path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._position += len(complete)
        if self._pace is None and self.total is not None:
            self._pace = Pace(total=self.total)
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # `report` names damaged lines; a view of the rest is still useful
            if isinstance(row, dict) and type(row.get("step")) is int:
                self._take(row)
        self.evaluation = _first_set(self.folder.evaluations) or self.evaluation

    def _take(self, row: dict[str, Any]) -> None:
        self.row = row
        self.losses.append(math.nan if row.get("loss") is None else float(row["loss"]))
        if self._pace is not None and {"seconds", "step_seconds"} <= row.keys():
            self._pace.remaining(row)


def curve(values: Sequence[float], *, width: int = _CURVE) -> str:
    """Return a line of blocks for the values, each the mean of its share; ``x`` where one is not finite."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((m - low) * scale)] if math.isfinite(m) else "x" for m in means)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs in the given folders: each is a run, or contains runs, as ``runs`` or a sweep's folder.

    Raises:
        RunFolderError: there is no such folder, or no run in it.

    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise RunFolderError(f"there is no directory {path}; give directories of runs")
        inside = [path] if RunFolder(path).holds_a_run else []
        for pattern in ("*", "runs/*"):
            inside = inside or [each for each in sorted(path.glob(pattern)) if RunFolder(each).holds_a_run]
        if not inside:
            raise RunFolderError(f"{path} contains no run; give directories of runs, or a directory of them")
        found += inside
    return list(dict.fromkeys(found))


def table_of(runs: Sequence[WatchedRun], labels: Sequence[str], *, width: int) -> Table:
    """Return the table of the runs, without its least important columns where ``width`` is too small."""
    from rich.table import Table

    columns = {"run": list(labels), **{name: [show(run) for run in runs] for name, show in _COLUMNS.items()}}
    columns = {name: cells for name, cells in columns.items() if name in _KEPT or any(cells)}
    for name in _DROPPED:
        if sum(max(map(len, [title, *cells])) + 2 for title, cells in columns.items()) - 2 > width:
            columns.pop(name, None)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "curve", "state") else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def watch(
    paths: Sequence[Path], labels: Callable[[Sequence[Path]], Sequence[str]], *, interval: float
) -> None:
    """Show the runs until all of them are finished, or until Ctrl-C; into a file or pipe once.

    Args:
        paths: folders of runs, or folders that contain runs.
        labels: returns the names to show for the folders of the runs.
        interval: seconds between updates.

    Raises:
        RunFolderError: there is no run.
        ImportError: rich is not installed.

    """
    from rich.console import Console
    from rich.live import Live

    found = find_runs(paths)
    runs, names = [WatchedRun(path) for path in found], labels(found)
    console = Console()

    def refreshed() -> Table:
        for run in runs:
            run.refresh()
        return table_of(runs, names, width=console.width)

    if not console.is_terminal:
        console.width = 200  # a pipe has no width; a narrow table would lose columns
        console.print(refreshed())
        return
    with Live(refreshed(), console=console, auto_refresh=False) as live:
        try:
            while not all(run.is_finished for run in runs):
                time.sleep(interval)
                live.update(refreshed(), refresh=True)
        except KeyboardInterrupt:  # how the user ends the view
            pass


def _number(name: str, form: str) -> Callable[[WatchedRun], str]:
    def show(run: WatchedRun) -> str:
        if name not in run.row or run.row[name] is None:  # null: not finite, or there is no search
            return "non-finite" if name == "loss" and run.row else ""
        return format(float(run.row[name]), form)

    return show


def _steps(run: WatchedRun) -> str:
    return f"{run.row.get('step', 0):,}/{'?' if run.total is None else f'{run.total:,}'}"


def _evaluated(run: WatchedRun) -> str:
    """Return the result of an evaluation: the accuracy of a task with answers, else the perplexity."""
    row = run.evaluation
    if run.spec is not None and run.spec.data.task is not None:
        return "" if row.get("accuracy_last") is None else f"{float(row['accuracy_last']):.1%}"
    return "" if row.get("perplexity") is None else f"ppl {float(row['perplexity']):.2f}"


def _iterations(run: WatchedRun) -> str:
    row = run.row
    return "" if row.get("iterations") is None else f"{row['iterations']:.1f}/{row.get('iterations_max')}"


def _speed(run: WatchedRun) -> str:
    speed = run.row.get("tokens_per_second")
    return "" if speed is None else magnitude(float(speed))


_COLUMNS: dict[str, Callable[[WatchedRun], str]] = {
    "step": _steps,
    "phase": lambda run: str(run.row.get("phase", "")),
    "loss": _number("loss", ".4f"),
    "curve": lambda run: curve(run.losses),
    "eval": _evaluated,
    "iter": _iterations,
    "res": _number("residual", ".1e"),
    "unconverged": _number("non_converged", ".0%"),
    "tok/s": _speed,
    "state": lambda run: run.state,
}
"""The columns after the run's name."""
_KEPT = ("run", "step", "loss", "state")
_DROPPED = ("phase", "res", "tok/s", "unconverged", "curve", "eval", "iter")
"""Columns in the order in which a narrow terminal loses them."""


def _first_set(file: MetricsFile) -> dict[str, Any]:
    """Return the row of the first set of the last evaluation."""
    last = file.last_row()
    if last is None:
        return {}
    return next((row for row in file.rows(damaged=lambda _: None) if row["step"] == last["step"]), last)
