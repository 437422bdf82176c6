"""The README's five commands, from a text file to an exported model: seconds and lines of output of each.

    python benchmarks/five_commands.py tinyshakespeare.txt [--set training.max_tokens=4096 …]

The commands are read from README.md and run in an empty folder, with their output redirected, as on a machine
with ``--threads`` cores. The output is kept in ``results/five_commands.json`` beside the times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import RESULTS, machine

README = Path(__file__).resolve().parents[1] / "README.md"
TEXT = "tinyshakespeare.txt"
PROGRAM = "import sys; from implicit_blocks._utils.console import main; sys.exit(main())"
SCREEN = 40
"""Lines of a screenful."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="the text file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="PATH=VALUE", help="overrides of the training"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "five_commands.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.text, Path(folder) / TEXT)
        rows = [run(command, Path(folder), arguments) for command in commands()]
    whole = {name: round(sum(row[name] for row in rows), 1) for name in ("seconds", "cpu_seconds")}
    result = {"machine": machine(), "threads": arguments.threads, "set": arguments.set, **whole, "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        used = f"{row['seconds']:>8.1f} s{row['cpu_seconds']:>8.1f} s CPU"
        print(f"{used}{row['lines']:>5} lines  {row['command']}")
    print(f"{whole['seconds']:>8.1f} s{whole['cpu_seconds']:>8.1f} s CPU in all; see {arguments.output}")
    if any(row["exit_code"] or row["lines"] > SCREEN for row in rows):
        sys.exit(f"a command failed, or printed more than {SCREEN} lines")


def commands() -> list[str]:
    """Return the commands of the README's block that begins with the text file."""
    blocks = README.read_text(encoding="utf-8").split("```")[1::2]
    (block,) = [block for block in blocks if block.startswith("sh") and TEXT in block]
    return block.strip().splitlines()[1:]


def run(command: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a command of the README in a folder; return its times and what it printed."""
    program, name, *rest = shlex.split(command)
    assert program == "implicit-blocks"
    extra = arguments.set if name == "train" else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, *rest, *extra],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = done.stdout.splitlines()
    return {
        "command": command,
        "exit_code": done.returncode,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "lines": len(lines),
        "output": lines,
    }


if __name__ == "__main__":
    main()
