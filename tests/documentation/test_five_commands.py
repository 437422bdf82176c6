"""``benchmarks/five_commands.py``: the README's commands from a text file to an exported model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "five_commands.py"
SMALL = ("training.max_tokens=4096", "model.d_model=16", "model.n_layers=1", "model.mixer.n_heads=2")
PROCESS_SECONDS = 600


@pytest.mark.slow
def test_a_text_file_becomes_an_exported_model(tmp_path: Path) -> None:
    for package in ("tokenizers", "transformers", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    text = "".join(f"ROMEO:\nLine {number} of the play, and of its night.\n" for number in range(2000))
    (tmp_path / "text.txt").write_text(text)
    command = [sys.executable, str(PROGRAM), str(tmp_path / "text.txt"), "--threads", "1"]
    command += ["--output", str(tmp_path / "times.json"), "--set", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    names = ["tokenize", "train", "generate", "evaluate", "export"]
    assert [row["command"].split()[1] for row in rows] == names
    assert all(row["exit_code"] == 0 and 0 < row["lines"] <= 40 for row in rows)


def test_the_page_has_the_measured_times_and_figures() -> None:
    root = PROGRAM.parents[1]
    measured = json.loads((root / "benchmarks" / "results" / "five_commands.json").read_text())
    page = " ".join((root / "docs" / "from_text.md").read_text(encoding="utf-8").split())
    rows = measured["rows"]
    seconds = [f"{row['seconds']:.1f}" for row in rows]
    lines = [str(row["lines"]) for row in rows]
    assert f"took {', '.join(seconds[:-1])} and {seconds[-1]} s, {measured['seconds']:.0f} s in all" in page
    assert f"They print {', '.join(lines[:-1])} and {lines[-1]} lines" in page
    (row,) = (line for line in rows[3]["output"] if line.startswith("|    128"))
    perplexity, converged = (row.split("|")[cell].strip() for cell in (3, 7))
    assert f"was {float(perplexity):.1f} per token; {converged[:-1]} % of the tokens converged" in page
