"""Processor time of the demo's two training runs, at an earlier commit and now.

    python benchmarks/demo_cpu.py --than COMMIT [--steps 40] [--rounds 3]

Trains ``word_problem_s3`` and ``word_problem_s3_explicit`` for fewer steps, alternately with the commit's
source tree and this one, with one thread and the same seed. It compares the processor time of the whole
process in user mode, including start and imports, since the machine may be shared: the median of the ratios
over rounds. The cost of a start (four steps) is measured separately.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import machine, write

ROOT = Path(__file__).resolve().parents[1]
SPECS = {
    "word_problem_s3": 1,
    "word_problem_s3_explicit": 8,
}  # with a multiple of the steps for the cheap one
FEWEST = 4  # minimum number of steps that contains both phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--than", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        then = Path(folder) / "then"
        git("worktree", "add", "--quiet", "--detach", str(then), arguments.than)
        try:
            rows = [compare(spec, then, Path(folder), arguments) for spec in SPECS]
        finally:
            git("worktree", "remove", "--force", str(then))
    commits = {
        "then": git("rev-parse", "--short", arguments.than),
        "now": git("rev-parse", "--short", "HEAD"),
    }
    write("demo_cpu", {"machine": machine(), "arguments": vars(arguments), "commits": commits, "rows": rows})


def git(*words: str) -> str:
    found = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def compare(spec: str, then: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with each tree in turn; return the processor times and the final metrics."""
    trees = {"then": then, "now": ROOT}
    steps = SPECS[spec] * arguments.steps
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    starts: dict[str, list[float]] = {name: [] for name in trees}
    ended: dict[str, Any] = {}
    for turn in range(arguments.rounds):
        for name, tree in trees.items():
            starts[name].append(train(spec, tree, folder / f"{spec}-{name}-{turn}-start", FEWEST)[0])
            took, last = train(spec, tree, folder / f"{spec}-{name}-{turn}", steps)
            seconds[name].append(took)
            ended[name] = {key: last[key] for key in ("loss", "iterations") if key in last}
    row = {
        "spec": spec,
        "steps": steps,
        "user_s": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "start_user_s": {name: round(min(values), 2) for name, values in starts.items()},
        "last_step": ended,
    }
    row |= ratios(row["user_s"])
    print(row, flush=True)
    return row


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return median, minimum and maximum of the ratios per round, since runs of a round share a load."""
    found = [now / then for then, now in zip(seconds["then"], seconds["now"], strict=True)]
    return {
        "now_over_then": round(statistics.median(found), 3),
        "least_ratio": round(min(found), 3),
        "largest_ratio": round(max(found), 3),
    }


def train(spec: str, tree: Path, output: Path, steps: int) -> tuple[float, dict[str, Any]]:
    """Return the processor time of a run in user mode, and its last line of metrics."""
    changes = [
        "training.threads=1",
        f"training.max_steps={steps}",
        "training.checkpoint_every=1000",
        "evaluation.sequences=4",
        "evaluation.lengths=[32]",
        "evaluation.batch_size=4",
    ]
    command = [sys.executable, "-m", "trainer", "--spec", spec, "--output", str(output), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        [*command, *changes], cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    message = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(
            f"error: {spec} in {tree} failed with exit code {process.returncode}: {message[-500:]}"
        )
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return usage.ru_utime, json.loads(lines[-1])


if __name__ == "__main__":
    main()
