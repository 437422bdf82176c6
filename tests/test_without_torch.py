"""Programs in an environment without torch: they work if they need none, else they report it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(module, *arguments):
    """Run a program in which torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None; import importlib; "
        f"sys.exit(importlib.import_module({module!r}).main({[*map(str, arguments)]!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("trainer.cli.train", ["--spec", "word_problem_s3"]),
        ("implicit_blocks.__main__", ["generate", "runs/none", "0"]),
        ("trainer.evaluate", ["--checkpoint", "runs/none", "--tasks", "--tokens", "text.bin"]),
    ],
    ids=["trainer", "generate", "evaluate"],
)
def test_programs_that_need_torch_report_that_it_is_missing(module, arguments):
    done = run(module, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: torch is not installed; pip install torch")
    assert "Traceback" not in done.stderr


def test_a_dry_run_needs_no_torch():
    done = run("trainer.cli.train", "--spec", "llama_1.3b", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "phase free" in done.stdout
