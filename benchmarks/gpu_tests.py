"""Run the tests that need a GPU, and record the outcome of each: passed, failed or skipped, when and where.

    python benchmarks/gpu_tests.py [--processes 8] [--output gpu_tests] [--anew] [pytest arguments …]

By default these are all tests marked ``gpu``, as ``make test-gpu`` runs them. Tests without a recorded
outcome run first, then failed ones; long ones start early. ``results/NAME.json`` contains the last outcome of
each test with its run, its duration, and the reason of a failure or skip. The file is written repeatedly, so
that an interrupted run (``"complete": false``) keeps its results. Tests that a run did not reach keep their
previous outcome; ``"unseen"`` lists tests without any. ``--anew`` discards previous outcomes except for
durations, so that all results belong to one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from report import RESULTS, machine

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = ("passed", "failed", "skipped")
EVERY = 5  # seconds between writes
KNOWN = "GPU_TESTS_KNOWN"  # environment variable: the file of previous outcomes, for each process


class Recorder:
    """Records reports from all processes, together with previous outcomes of other tests.

    Args:
        path: the output file.
        command: the command of this run.
        whole: whether the run includes whole files, so that other recorded tests of them no longer exist.
        everything: whether it includes all files, so that other recorded tests no longer exist.
        anew: whether previous outcomes are discarded.

    """

    def __init__(
        self, path: Path, command: str, *, whole: bool = False, everything: bool = False, anew: bool = False
    ) -> None:
        self._path, self._whole, self._everything = path, whole, everything
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        before: dict[str, dict[str, Any]] = known.get("tests", {})
        self.seconds: dict[str, float] = {name: test["seconds"] for name, test in before.items()}
        self.tests: dict[str, dict[str, Any]] = {} if anew else dict(before)
        self._runs: dict[str, dict[str, Any]] = dict(known.get("runs", {}))
        described = machine()
        self.run: str = described["date"]
        self._runs[self.run] = {"command": command, "machine": described}
        self._ran: dict[str, dict[str, Any]] = {}  # in this run
        self._collected: list[str] = []
        self._began = self._written = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the names of all tests, in a run with one process."""
        self._collected = [item.nodeid for item in session.items] or self._collected

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Record the names of all tests, in a run with several processes."""
        self._collected = list(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a report, and print a failure immediately."""
        ran = self._ran.setdefault(report.nodeid, {"outcome": None, "seconds": 0.0, "run": self.run})
        ran["seconds"] = round(ran["seconds"] + report.duration, 1)
        if report.failed:
            text = str(report.longrepr)
            messages = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
            messages = (
                messages if len(messages) <= 24 else [*messages[:12], "…", *messages[-12:]]
            )  # long messages start with the reason
            ran["outcome"] = "failed"
            log_lines = str(getattr(report, "caplog", "")).splitlines()[
                -8:
            ]  # such as the reason why a graph was not captured
            messages += [line[:300] for line in log_lines]
            ran["why"] = without_places(f"[{report.when}] " + "\n".join(messages)[:2000])
            print("\n".join(["", f"FAILED {report.nodeid} [{report.when}]", *messages]), flush=True)
        elif report.skipped:
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            ran |= {"outcome": "skipped", "why": why.removeprefix("Skipped: ")}
        elif report.when == "call" and ran["outcome"] is None:
            ran["outcome"] = "passed"
        if ran["outcome"] is not None:  # None after a long set-up, while the test runs
            self.tests[report.nodeid] = ran
        if time.monotonic() - self._written > EVERY:
            self.write(complete=False)

    def write(self, *, complete: bool) -> dict[str, Any]:
        """Write the results so far; ``complete`` if all selected tests have run."""
        self._written = time.monotonic()
        files_collected = {name.partition("::")[0] for name in self._collected}
        self.tests = {
            name: test
            for name, test in self.tests.items()
            if name in self._collected
            or not self._whole
            or not (self._everything or name.partition("::")[0] in files_collected)
        }
        self._runs[self.run] |= {
            "complete": complete,
            "wall_seconds": round(self._written - self._began, 1),
            "in_all": counts(self._ran.values()),
        }
        tests = dict(sorted(self.tests.items()))
        skipped: dict[str, list[str]] = {}
        for name, test in tests.items():
            if test["outcome"] == "skipped":
                skipped.setdefault(test["why"], []).append(name)
        files: dict[str, list[dict[str, Any]]] = {}
        for name, test in tests.items():
            files.setdefault(name.partition("::")[0], []).append(test)
        slowest = sorted(tests, key=lambda name: -tests[name]["seconds"])[:20]
        result = {
            "runs": {
                run: self._runs[run] for run in sorted({test["run"] for test in tests.values()} | {self.run})
            },
            "complete": complete,
            "in_all": counts(tests.values()),
            "files": {
                name: counts(of) | {"seconds": round(sum(test["seconds"] for test in of), 1)}
                for name, of in files.items()
            },
            "failures": {name: test["why"] for name, test in tests.items() if test["outcome"] == "failed"},
            "skipped": dict(sorted(skipped.items())),
            "unseen": sorted(set(self._collected) - set(tests)),
            "slowest": {name: tests[name]["seconds"] for name in slowest},
            "tests": tests,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return result


def counts(tests: Any) -> dict[str, int]:
    """Return the number of tests by outcome."""
    found = Counter(test["outcome"] for test in tests)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests: first those without an outcome, then failed ones; a hook of each process.

    Within each group, alternate the longest and the shortest known durations: long tests start early, and the
    tests that a process has queued behind one (at least two are its own) are short.
    """
    if not (path := os.environ.get(KNOWN)):
        return
    known: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    outcomes, seconds = known["outcomes"], known["seconds"]
    turns = {None: 0, "failed": 1}
    groups: dict[int, list[pytest.Item]] = {0: [], 1: [], 2: []}
    for item in sorted(items, key=lambda item: -seconds.get(item.nodeid, 0.0)):
        groups[turns.get(outcomes.get(item.nodeid), 2)].append(item)
    items[:] = [item for group in groups.values() for item in interleaved(group)]


def interleaved(longest_first: list[pytest.Item]) -> list[pytest.Item]:
    """Return the first, the last, the second, the second to last, and so on."""
    half = (len(longest_first) + 1) // 2
    pairs = zip_longest(longest_first[:half], reversed(longest_first[half:]))
    return [item for pair in pairs for item in pair if item is not None]


def without_places(text: str) -> str:
    """Return a text with file names relative to the repository or the site packages."""
    return re.sub(r'"[^"\n]*/site-packages/', '"', text.replace(f"{ROOT}/", ""))


def files_with_the_mark() -> list[str]:
    """Return the test files whose tests may be marked ``gpu``, so that processes import no others.

    These are files in folders named ``gpu``, files that contain the mark, and files that import from
    ``tests/gpu``, which also has marks for import.
    """
    found = []
    for path in (path for folder in ("tests", "plugins") for path in (ROOT / folder).rglob("test_*.py")):
        name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        if "gpu" in name.parts or "mark.gpu" in text or "tests.gpu" in text:
            found.append(str(name))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1, help="parallel processes on one GPU")
    parser.add_argument("--output", default="gpu_tests", help="name in results, or a path without .json")
    parser.add_argument("--anew", action="store_true", help="discard outcomes of earlier runs")
    arguments, others = parser.parse_known_args()
    given = [word for word in sys.argv[1:] if word not in ("--output", arguments.output)]
    command = " ".join(["python benchmarks/gpu_tests.py", *given])
    path = RESULTS / f"{arguments.output}.json"
    named = [word for word in others if not word.startswith("-")]
    given = [name for name in named if (ROOT / name.partition("::")[0]).exists()]
    whole = not any(word == "-k" or "::" in word for word in others)
    recorder = Recorder(path, command, whole=whole, everything=whole and not given, anew=arguments.anew)
    together = (
        ["-n", str(arguments.processes), "--maxschedchunk", "1"] if arguments.processes > 1 else []
    )  # in order, so that no test waits behind a long one
    with tempfile.TemporaryDirectory() as folder:
        # The processes share compiled and tuned kernels, which are used only for tests.
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        known = (
            Path(folder) / "known.json"
        )  # constant during the run: each process must compute the same order
        outcomes = {name: test["outcome"] for name, test in recorder.tests.items()}
        known.write_text(json.dumps({"outcomes": outcomes, "seconds": recorder.seconds}), "utf-8")
        os.environ[KNOWN] = str(known)
        code = pytest.main(
            [
                *["-m", "gpu", "-q", "--tb=short", "-p", "gpu_tests", *together, *others],
                *([] if given else files_with_the_mark()),
            ],
            plugins=[recorder],
        )
    complete = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    result = recorder.write(complete=complete)
    for name, of in result["files"].items():
        print(f"{name}: " + ", ".join(f"{number} {what}" for what, number in of.items()))
    ran = result["runs"][recorder.run]
    print("this run:", ran["in_all"], "" if complete else "(interrupted)", f"{ran['wall_seconds']:.0f} s")
    print("all recorded:", result["in_all"], f"{len(result['unseen'])} unseen")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
