"""``python -m trainer.sweep``: runs, resuming, failures, and invalid requests."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks.specs import load_spec
from implicit_blocks.specs.tree import dump_yaml
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.sweep.command import main

Small = Callable[..., RunSpec]
RATE = "training.optimizer.learning_rate"


@pytest.fixture
def spec(small: Small, tmp_path: Path) -> str:
    """Return the path of a small spec."""
    tree = small({"evaluation.lengths": [12], "evaluation.sequences": 4}).model_dump(mode="json")
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_yaml(tree), encoding="utf-8")
    return str(path)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return found


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def sweep(spec: str, folder: Path, *arguments: str) -> int:
    return main([spec, "--output", str(folder), "--device", "cpu", *arguments])


def test_a_sweep_trains_ordinary_runs_and_continues(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    # One run of the grid was interrupted earlier.
    changed = load_spec(spec, [f"{RATE}=2e-3", "training.seed=1"])
    assert isinstance(changed, RunSpec)
    interrupted = folder / "runs" / "learning_rate=0.002,seed=1"
    build(changed, output=interrupted, device="cpu").train(stop_at=2)

    assert sweep(spec, folder, "--grid", f"{RATE}=1e-3,2e-3", "--seeds", "1", "--processes", "2") == 0
    table = capsys.readouterr().out
    assert "2 runs in" in table
    assert "the best learning_rate" in table
    found = results(folder)
    assert [run["status"] for run in found["runs"]] == ["finished", "finished"]
    means = [cell["mean"] for cell in found["cells"]]
    assert means == sorted(means)
    assert found["best"]["mean"] == means[0]
    assert (folder / "sweep.png").stat().st_size > 1000
    assert (folder / "sweep.md").read_text().strip() in table
    assert [row["step"] for row in read_metrics(interrupted / "metrics.jsonl")] == [1, 2, 3, 4]
    manifest = json.loads((interrupted / "manifest.json").read_text())
    assert [resume["step"] for resume in manifest["resumed"]] == [2]

    # A run of the sweep has the files and values of python -m trainer.
    alone = tmp_path / "alone"
    build(changed, output=alone, device="cpu").train()
    assert losses(interrupted) == losses(alone)
    names = {*(path.name for path in alone.iterdir()), "report.png"}  # no plots in the process of the tests
    assert {path.name for path in (folder / "runs" / "learning_rate=0.001,seed=1").iterdir()} == names

    # A wider grid trains only its new runs; differently written equal values share one run.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")}
    assert sweep(spec, folder, "--grid", f"{RATE}=0.001,2.0e-3,4e-3", "--seeds", "1") == 0
    assert "3 runs in" in (shown := capsys.readouterr().out)
    assert "2 of them done already" in shown
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(folder.glob("runs/*"))) == 3
    summaries = [json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")]
    assert {summary["steps"] for summary in summaries} == {4}


def test_runs_that_diverge_or_end_early_are_marked(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, grid = tmp_path / "sweep", ["--grid", f"{RATE}=1e-3,1e30"]
    stop = "callbacks=[{kind: stop_when, value: gradient_norm, above: 0, steps: 3}]"
    assert sweep(spec, folder, stop, *grid) == 0
    early, diverged = results(folder)["runs"]
    assert early["status"] == "finished"
    assert early["marks"][0].startswith("ended early at step 3: gradient_norm")
    assert any("not converged" in mark for mark in early["marks"])
    assert (diverged["status"], diverged["exit_code"], diverged["value"]) == ("failed", 3, None)
    assert diverged["marks"][0].startswith("diverged: ")
    assert results(folder)["best"]["settings"] == {RATE: 1e-3}
    assert "diverged" in capsys.readouterr().out

    log = folder / "logs" / "learning_rate=1e+30.txt"
    size = log.stat().st_size
    assert sweep(spec, folder, stop, *grid) == 0
    assert log.stat().st_size == size, "a run that diverged is not repeated"
    assert results(folder)["runs"][1]["marks"] == diverged["marks"]
    assert sweep(spec, folder, stop, *grid, "--retry-diverged") == 0
    assert log.stat().st_size > size


def test_other_failures_are_reported_and_tried_again(spec: str, tmp_path: Path) -> None:
    folder, grid = (
        tmp_path / "sweep",
        ["--grid", "training.optimizer.options={momentum: 0.9},{momentun: 0.9}"],
    )
    optimizer = "training.optimizer={kind: torch, class: torch.optim.SGD, learning_rate: 0.1}"
    for _ in range(2):
        assert sweep(spec, folder, optimizer, *grid) == 1
    fine, failed = results(folder)["runs"]
    assert fine["status"] == "finished"
    assert failed["exit_code"] == 2
    assert "did you mean 'momentum'" in failed["reason"]
    (log,) = (path for path in folder.glob("logs/*") if "momentun" in path.name)
    assert log.read_text().count("did you mean") == 2


def test_a_signal_saves_the_runs_and_the_same_command_continues(spec: str, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    arguments = ["training.max_steps=60", "--grid", f"{RATE}=1e-3"]
    metrics = folder / "runs" / "learning_rate=0.001" / "metrics.jsonl"

    def stop() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (metrics.is_file() and metrics.stat().st_size > 0):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    code = sweep(spec, folder, *arguments)
    thread.join()
    assert code == 75
    steps = len(losses(metrics.parent))
    assert 0 < steps < 60
    assert (metrics.parent / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert sweep(spec, folder, *arguments) == 0
    assert results(folder)["runs"][0]["steps"] == len(losses(metrics.parent)) == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "training.max_steps"], "'training.max_steps' is not an axis; write path.to.key="),
        (["--grid", "training.max_steps=1,,2"], "is not an axis"),
        (["--grid", f"{RATE}=1e-3,0.001"], "has the value 1e-3 twice"),
        (["--grid", "training.seed=1,2", "training.seed=3"], "training.seed twice"),
        (["--grid", "training.seed=1,2", "--seeds", "1"], "use --seeds alone"),
        (["--seeds", "1,1"], "contains a seed twice: 1, 1"),
        (["--processes", "0"], "--processes must be at least 1, got 0"),
        (["--grid", "training.optimizer.learning_rat=1,2"], "did you mean 'learning_rate'"),
        (["--grid", f"{RATE}=1e-3,-1"], "greater than 0"),
    ],
    ids=["no values", "empty", "equal", "key twice", "seed", "seeds", "processes", "key", "value"],
)
def test_an_invalid_request_is_refused_before_anything_is_written(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert sweep(spec, tmp_path / "sweep", *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_a_folder_with_runs_of_other_settings_is_refused(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(_loaded(spec), output=tmp_path / "sweep" / "runs" / "run", device="cpu").train(stop_at=1)
    assert sweep(spec, tmp_path / "sweep", "training.max_steps=9") == 2
    assert "training.max_steps: 4 → 9" in capsys.readouterr().err
    assert sweep(spec, tmp_path / "sweep", "--only-finished", "--metric", "accuracy") == 0
    assert "unfinished" in capsys.readouterr().out
    assert results(tmp_path / "sweep")["better"] == "higher"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sweep(spec, tmp_path / "other") == 2
    assert "torchrun" in capsys.readouterr().err


def _loaded(spec: str) -> RunSpec:
    loaded = load_spec(spec)
    assert isinstance(loaded, RunSpec)
    return loaded
