"""Run the tests that need a GPU, and keep what came of them: passed, failed and skipped, file by file.

    python benchmarks/gpu_tests.py [--processes 8] [--output gpu_tests] [what pytest takes …]

Without further words these are all tests marked ``gpu``, as ``make test-gpu`` runs them. What came of them,
``results/NAME.json``, holds the counts of each file, the seconds, why tests failed or were skipped, and what
they ran on. It is written again and again meanwhile, so that a run that is cut off (``"complete": false``)
leaves what it knew.
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
from pathlib import Path
from typing import Any

import pytest
from report import RESULTS, machine

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = ("passed", "failed", "skipped")
EVERY = 5  # seconds between two writings


class Recorder:
    """Counts reports as they come, from whatever process."""

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._files: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()
        self._slowest: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._skipped: dict[str, list[str]] = {}
        self._known: dict[str, Any] = {"machine": machine(), "command": command}
        self._began = self._written = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report; a failure is printed at once."""
        file = report.nodeid.partition("::")[0]
        counts = self._files.setdefault(file, Counter())
        self._seconds[file] += report.duration
        self._slowest[report.nodeid] += report.duration
        if report.failed:
            counts["failed"] += 1
            text = str(report.longrepr)
            said = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
            said = (
                said if len(said) <= 24 else [*said[:12], "…", *said[-12:]]
            )  # long ones begin with the reason
            self._failures[f"{report.nodeid} [{report.when}]"] = without_places("\n".join(said)[:2000])
            print("\n".join(["", f"FAILED {report.nodeid} [{report.when}]", *said]), flush=True)
        elif report.skipped:
            counts["skipped"] += 1
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            self._skipped.setdefault(why.removeprefix("Skipped: "), []).append(report.nodeid)
        elif report.when == "call":
            counts["passed"] += 1
        if time.monotonic() - self._written > EVERY:
            self.write(complete=False)

    def write(self, *, complete: bool) -> dict[str, Any]:
        """Write down what is known so far."""
        self._written = time.monotonic()
        files = {
            name: {outcome: counts[outcome] for outcome in OUTCOMES}
            | {"seconds": round(self._seconds[name], 1)}
            for name, counts in sorted(self._files.items())
        }
        result = self._known | {
            "complete": complete,
            "wall_seconds": round(self._written - self._began, 1),
            "in_all": {outcome: sum(counts[outcome] for counts in files.values()) for outcome in OUTCOMES},
            "files": files,
            "failures": self._failures,
            "skipped": {why: sorted(tests) for why, tests in sorted(self._skipped.items())},
            "slowest": {name: round(seconds, 1) for name, seconds in self._slowest.most_common(20)},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result


def without_places(text: str) -> str:
    """Return a text in which files are named from the repository's or the packages' folder on."""
    return re.sub(r'"[^"\n]*/site-packages/', '"', text.replace(f"{ROOT}/", ""))


def files_with_the_mark() -> list[str]:
    """Return the test files that have tests marked ``gpu``: each process would import all the others too."""
    found = (path for folder in ("tests", "plugins") for path in (ROOT / folder).rglob("test_*.py"))
    return sorted(
        str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text(encoding="utf-8")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1, help="at once, on one card")
    parser.add_argument("--output", default="gpu_tests", help="in results, or a path without .json")
    arguments, others = parser.parse_known_args()
    given = [word for word in sys.argv[1:] if word not in ("--output", arguments.output)]
    command = " ".join(["python benchmarks/gpu_tests.py", *given])
    recorder = Recorder(RESULTS / f"{arguments.output}.json", command)
    paths = (word.partition("::")[0] for word in others if not word.startswith("-"))
    given = [path for path in paths if (ROOT / path).exists()]
    together = ["-n", str(arguments.processes)] if arguments.processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        # What one process has compiled and tuned, the others take; none of it is for anything but tests.
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        code = pytest.main(
            ["-m", "gpu", "-q", "--tb=short", *together, *others, *([] if given else files_with_the_mark())],
            plugins=[recorder],
        )
    complete = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    result = recorder.write(complete=complete)
    for name, counts in result["files"].items():
        print(f"{name}: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
    print(result["in_all"], "" if complete else "(cut off)", f"{result['wall_seconds']:.0f} s")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
