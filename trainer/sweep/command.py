"""The command line: ``python -m trainer.sweep SPEC --grid training.optimizer.learning_rate=1e-3,2e-3 …``.

Exit codes: 0 every run has a result (it finished, or its loss became NaN or infinite); 1 runs failed
otherwise; 2 the request cannot be carried out; 75 stopped by SIGTERM and 130 by Ctrl-C, after saving the runs
in progress. The same command continues a sweep.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from implicit_blocks._utils.hints import without_torch
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks._utils.programs import CommandParser
from implicit_blocks.specs import load_spec, spec_name
from trainer.cli.exit_codes import INTERRUPTED, NOT_FINITE, REFUSED, TO_BE_RESUMED, refuse
from trainer.reporting.display import counted, duration
from trainer.reporting.pictures import write_picture
from trainer.run.length import resolve_epochs
from trainer.specs.run import RunSpec
from trainer.storage.files import read_json, write_atomically, write_json
from trainer.storage.lock import FolderLock, LockedError
from trainer.storage.run_folder import RunFolder, claim_folder, differences
from trainer.sweep.grid import Axis, GridRun, make_runs, parse_axes
from trainer.sweep.in_one_process import run_side_by_side
from trainer.sweep.queue import Job, QueueStopped, run_queue
from trainer.sweep.results import METRICS, Measure, best_cell, edge_notes, read_outcome, summarize_cells
from trainer.sweep.tables import sweep_table

FAILED = 1
_RESULTS = "sweep.json"


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    command = CommandParser(
        prog="python -m trainer.sweep",
        description="Train a grid of runs; compare them in a table, a plot and a JSON file.",
        epilog="The same command continues an interrupted sweep, and adds the runs of a wider grid.",
    )
    add = command.add_argument
    add("spec", metavar="SPEC", help="YAML file of the run, or its name in the zoo")
    add("overrides", nargs="*", metavar="path.to.key=value", help="overrides for all runs")
    add(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="path.to.key=value,value",
        help="fields of the spec and their values; the grid contains all combinations",
    )
    add("--seeds", type=_numbers, default=[], metavar="N,N", help="seeds of each cell, one run each")
    add("--processes", type=int, default=1, metavar="N", help="runs at once, on one device (1)")
    add(
        "--side-by-side",
        type=int,
        metavar="N",
        help="train N runs at once in one process, each on a stream of the device with its steps captured as "
        "CUDA graphs where possible: faster for small models on a GPU",
    )
    add(
        "--metric",
        choices=METRICS,
        default="loss",
        help="metric of the final evaluation to compare by (loss)",
    )
    add("--set", metavar="NAME", help="evaluation set of the metric (default: the first)")
    add("--output", type=Path, metavar="DIR", help="folder of the sweep (sweeps/<spec>-<time>)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, … (default: cuda if available)")
    add("--retry-diverged", action="store_true", help="train runs again whose loss became NaN or infinite")
    add("--only-finished", action="store_true", help="train nothing; compare the finished runs")
    return command


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m trainer.sweep``; return the exit code."""
    options = parser().parse_intermixed_args(arguments)
    try:
        if options.processes < 1:
            raise ValueError(f"--processes must be at least 1, got {options.processes}")
        if options.side_by_side is not None and options.side_by_side < 1:
            raise ValueError(f"--side-by-side must be at least 1, got {options.side_by_side}")
        if options.side_by_side is not None and options.processes > 1:
            raise ValueError("--side-by-side trains in one process; remove --processes")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("a sweep cannot run under torchrun; start it as one process, with --processes")
        axes = parse_axes(options.grid)
        sweep = Sweep(options, axes, make_runs(axes, options.seeds))
        return sweep.run()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "matplotlib":
            return refuse(f"matplotlib is not installed; {install_extra('train')}")
        return refuse(without_torch(error))
    except (ValueError, OSError) as error:
        return refuse(error, REFUSED)


class Sweep:
    """A sweep in its folder: ``runs/NAME`` for each run, ``logs/NAME.txt``, and the results.

    Args:
        options: of the command line.
        axes: of the grid.
        runs: of the grid.

    Raises:
        ValueError: a run of the grid has an invalid spec, or a folder holds a run of another spec.

    """

    def __init__(self, options: argparse.Namespace, axes: Sequence[Axis], runs: Sequence[GridRun]) -> None:
        self._options = options
        self._axes = axes
        self._runs = runs
        self._measure = Measure(options.metric, options.set)
        # All specs are validated before anything is trained or written.
        specs = {run.name: self._spec(run) for run in runs}
        self._folder: Path = options.output or Path("sweeps")
        if options.output is not None:
            for run in runs:
                _require_same_spec(RunFolder(self._path(run)), specs[run.name])
        self._failures: dict[str, dict[str, Any]] = self._earlier_failures()
        self._done = 0

    def run(self) -> int:
        """Train the runs that have no result yet, write the results, and return the exit code."""
        if self._options.output is None:
            self._folder = claim_folder(spec_name(self._options.spec), root=Path("sweeps"))
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FolderLock(self._folder / ".lock")
        except LockedError as error:
            raise ValueError(
                f"the sweep in {self._folder} is in progress already ({error.holder}); "
                "wait for it, or stop it"
            ) from None
        with lock:
            jobs = [] if self._options.only_finished else [self._job(run) for run in self._unfinished()]
            print(
                f"{counted(len(self._runs), 'run')} in {self._folder}, "
                f"{len(self._runs) - len(jobs)} of them done already"
            )
            code = self._train(jobs)
            print(self._write())
        return code

    def _train(self, jobs: Sequence[Job]) -> int:
        processes = min(self._options.processes, max(1, len(jobs)))
        threads = max(1, (os.cpu_count() or 1) // processes) if processes > 1 else None
        self._done = len(self._runs) - len(jobs)
        side_by_side, device = self._options.side_by_side, self._options.device
        try:
            if side_by_side is None:
                run_queue(jobs, processes=processes, threads=threads, ended=self._ended)
            else:
                run_side_by_side(jobs, side_by_side=side_by_side, device=device, ended=self._ended)
        except QueueStopped as stopped:
            again = f"continue by the same command with --output {self._folder}"
            print(f"interrupted; {again}", file=sys.stderr)
            return INTERRUPTED if stopped.args == (signal.SIGINT,) else TO_BE_RESUMED
        failed = [each for each in self._failures.values() if each["exit_code"] != NOT_FINITE]
        return FAILED if failed else 0

    def _ended(self, job: Job, code: int, seconds: float) -> None:
        """Record the end of a run, and show it."""
        self._done += 1
        run = next(run for run in self._runs if run.name == job.name)
        self._failures.pop(job.name, None)
        if code not in (0, TO_BE_RESUMED, INTERRUPTED):
            self._failures[job.name] = {"exit_code": code, "reason": _reason(job.log, code)}
        outcome = self._outcome(run)
        value = "" if outcome["value"] is None else f"{self._measure.metric} {outcome['value']:.5g}"
        shown = "; ".join(part for part in (value, *outcome["marks"]) if part)
        print(f"[{self._done}/{len(self._runs)}] {run.name}: {shown} ({duration(seconds)})", flush=True)
        write_json(self._folder / _RESULTS, self._results())

    def _results(self) -> dict[str, Any]:
        """Return the contents of ``sweep.json``."""
        outcomes = [self._outcome(run) for run in self._runs]
        cells = summarize_cells(outcomes, self._measure)
        best = best_cell(cells)
        sets = {outcome["set"] for outcome in outcomes if outcome.get("set") is not None}
        return {
            "spec": spec_name(self._options.spec),
            "overrides": self._options.overrides,
            "grid": {axis.key: list(axis.values) for axis in self._axes},
            "seeds": self._options.seeds,
            "metric": self._measure.metric,
            "set": sets.pop() if len(sets) == 1 else None,
            "better": "higher" if self._measure.sign > 0 else "lower",
            "best": best,
            "notes": edge_notes(self._axes, best),
            "cells": cells,
            "runs": outcomes,
        }

    def _write(self) -> str:
        """Write ``sweep.json``, ``sweep.md`` and ``sweep.png``; return the table and the paths."""
        from trainer.sweep.plot import draw_sweep  # matplotlib is imported when it is drawn

        written = self._results()
        table = sweep_table(written, self._axes)
        paths = [self._folder / _RESULTS, self._folder / "sweep.md", self._folder / "sweep.png"]
        write_json(paths[0], written)
        write_atomically(paths[1], f"{table}\n")
        write_picture(draw_sweep(written, self._axes), paths[2])
        return f"{table}\nwritten: {', '.join(map(str, paths))}"

    def _spec(self, run: GridRun) -> RunSpec:
        spec = load_spec(self._options.spec, [*self._options.overrides, *run.overrides])
        if not isinstance(spec, RunSpec):
            raise ValueError(
                f"{self._options.spec} is a spec of kind {spec.kind!r}; a sweep trains specs of kind 'run'"
            )
        return spec

    def _path(self, run: GridRun) -> Path:
        return self._folder / "runs" / run.name

    def _log(self, run: GridRun) -> Path:
        return self._folder / "logs" / f"{run.name}.txt"

    def _outcome(self, run: GridRun) -> dict[str, Any]:
        failure = self._failures.get(run.name, {})
        return read_outcome(run, self._path(run), self._measure, failure)

    def _unfinished(self) -> list[GridRun]:
        """Return the runs to train: those without a summary, unless they diverged before."""
        skipped = set() if self._options.retry_diverged else self._failures.keys()
        return [
            run
            for run in self._runs
            if run.name not in skipped and not RunFolder(self._path(run)).summary_path.is_file()
        ]

    def _job(self, run: GridRun) -> Job:
        folder = self._path(run)
        if RunFolder(folder).spec_path.is_file():
            start = ["--resume"]
        else:
            start = ["--spec", self._options.spec, *self._options.overrides, *run.overrides]
        arguments = [*start, "--output", str(folder), "--device", self._options.device]
        return Job(run.name, tuple(arguments), self._log(run))

    def _earlier_failures(self) -> dict[str, dict[str, Any]]:
        """Return the runs that diverged in an earlier call; other failures are tried again."""
        path = self._folder / _RESULTS
        if self._options.output is None or not path.is_file():
            return {}
        try:
            return {
                run["name"]: {"exit_code": run["exit_code"], "reason": run["reason"]}
                for run in read_json(path)["runs"]
                if run["status"] == "failed" and run["exit_code"] == NOT_FINITE
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} was not written by a sweep; move it away to continue") from error


def _require_same_spec(place: RunFolder, spec: RunSpec) -> None:
    """Refuse a folder that holds a run of another spec."""
    if not place.spec_path.is_file():
        return
    old = load_spec(place.spec_path).model_dump(mode="json")
    if changes := differences(old, resolve_epochs(spec).model_dump(mode="json")):
        raise ValueError(
            f"{place.path} holds a run with other settings ({'; '.join(changes[:3])}); "
            "choose another --output"
        )


def _reason(log: Path, code: int) -> str:
    """Return why a run failed: the last error in its output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    if code < 0:
        return f"killed by signal {-code}"
    return next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
