"""``benchmarks/oscillations.py``, which examines the searches of a run along training."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from implicit_blocks.registry import entries

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    *("model.d_model=16", "model.mixer.d_state=8", "model.mixer.head_dim=8", "phases=[]", "data.seq_len=4"),
    *("training.batch_size=4", "model.stopping.max_iterations=2", "evaluation.lengths=[16]"),
]


def test_the_weights_are_examined_at_their_turn_and_in_bursts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    program = importlib.import_module("oscillations")
    monkeypatch.setattr(importlib.import_module("report"), "RESULTS", tmp_path)
    options = [
        "--spec",
        "word_problem_s3",
        "--seeds",
        "5",
        "--stop-at",
        "6",
        "--every",
        "5",
        "--device",
        "cpu",
    ]
    options += ["--sequences", "3", "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["oscillations.py", *options, *SMALL])
    with entries.isolated():
        assert program.main() == 0
    (run,) = json.loads((tmp_path / "oscillations.json").read_text())["runs"]
    assert run["seed"] == 5
    assert [row["step"] for row in run["rows"]] == [4]  # two iterations are too few: every step is of a burst
    (row,) = run["rows"]
    assert row["not_converged"] > program.BURST
    assert row["first"]["identity"]["largest_radius"] >= 0
    assert sum(row["batch"][kind] for kind in row["batch"] if kind.startswith("at_later")) <= 3
