"""``python -m trainer.sweep --side-by-side``: runs in one process are those of ``python -m trainer``."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks.specs.tree import dump_yaml
from trainer.cli.train import main as train
from trainer.data.word_problem import WordProblemStream
from trainer.reporting.metrics import read_metrics
from trainer.reporting.report import draw
from trainer.run import build, look_ahead
from trainer.run.captured_step import CapturedStep
from trainer.specs.run import RunSpec
from trainer.sweep import command
from trainer.sweep.command import main
from trainer.sweep.queue import Job

Small = Callable[..., RunSpec]
RATE = "training.optimizer.learning_rate"
TIMES = {
    "seconds", "step_seconds", "tokens_per_second", "tflops", "tflops_executed", "memory_gb",
    "save_stall_seconds",
}  # fmt: skip


@pytest.fixture
def spec(small: Small, tmp_path: Path) -> str:
    """Return the path of a small spec with dropout, an average, checkpoints, evaluations and phases."""
    changes: dict[str, Any] = {
        "training.max_steps": 8,
        "training.evaluate_every": 4,
        "training.checkpoint_every": 3,
        "training.keep_checkpoints": 2,
        "training.ema": {"decay": 0.5, "start": 2},
        "model.dropout": 0.1,
        "model.gradient": {"kind": "unrolled", "steps": 2},
        "evaluation.lengths": [12],
        "evaluation.sequences": 4,
        "phases": [
            {"name": "one", "until": 5, "model": {"gradient": {"steps": 1}}},
            {"name": "two", "training": {"batch_size": 4}},
        ],
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_yaml(small(changes).model_dump(mode="json")), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def _plain_reports(monkeypatch: pytest.MonkeyPatch, python: Any) -> None:
    """Replace the pictures of the runs, which take most of their time; ``python`` loads torch meanwhile."""
    monkeypatch.setattr(build, "draw", lambda runs, path: path.write_bytes(b""))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs that share a process launch steps ahead of their results, without capturing them."""
    monkeypatch.setattr(look_ahead, "why_phase_not_captured", lambda spec, phase, device: None)
    monkeypatch.setattr(CapturedStep, "_may_capture", lambda step, loops: False)
    monkeypatch.setattr(look_ahead, "AT_ONCE", 2)


def sweep(spec: str, folder: Path, *arguments: str, side_by_side: int = 2) -> int:
    options = ["--device", "cpu", "--side-by-side", str(side_by_side)]
    return main([spec, "--output", str(folder), *options, *arguments])


def test_the_time_of_steps_whose_results_arrive_together_is_divided_among_them(
    spec: str, tmp_path: Path, ahead: None
) -> None:
    """Two launches that arrive during the turns of other runs share the time since the last results."""
    assert sweep(spec, tmp_path / "sweep", "training.evaluate_every=6", "training.checkpoint_every=6") == 0
    found = list(read_metrics(tmp_path / "sweep" / "runs" / "run" / "metrics.jsonl"))
    times = [row["step_seconds"] for row in found]
    assert len(set(times[:4])) == 1  # two launches of two steps
    assert sum(times) <= found[-1]["seconds"] + 5e-5 * len(times)  # rounded


def alone(spec: str, folder: Path, *overrides: str) -> Path:
    assert train(["--spec", spec, *overrides, "--output", str(folder), "--device", "cpu"]) == 0
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of metrics without what differs between two starts of one run."""
    return [{key: row[key] for key in row if key not in TIMES} for row in read_metrics(path)]


def require_close(path: Path, expected: Path, rel: float = 1e-4) -> None:
    """Require the rows of another file, with numbers up to rounding."""
    found, wanted = rows(path), rows(expected)
    assert [row.keys() for row in found] == [row.keys() for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        for key, value in other.items():
            is_number = isinstance(value, float)
            assert row[key] == (pytest.approx(value, rel=rel) if is_number else value), key


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def results(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["runs"]
    return found


def require_same_run(folder: Path, expected: Path) -> None:
    assert files(folder) == files(expected)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(folder / name) == rows(expected / name)
    for name in sorted(files(expected)):
        if name.endswith(".distcp"):  # the weights, their average and the optimizer
            assert (folder / name).read_bytes() == (expected / name).read_bytes()
    assert (folder / "spec.yaml").read_text() == (expected / "spec.yaml").read_text()


def test_runs_are_bit_by_bit_those_of_the_trainer(spec: str, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    assert sweep(spec, folder, "--grid", "training.seed=0,1", "data.identity_probability=0.25,0.5") == 0
    assert [run["status"] for run in results(folder)] == ["finished"] * 4
    for run in results(folder):
        overrides = [f"{key}={value}" for key, value in run["settings"].items()]
        require_same_run(Path(run["folder"]), alone(spec, tmp_path / run["name"], *overrides))
        log = (folder / "logs" / f"{run['name']}.txt").read_text()
        assert log.count("steps run eagerly, not as a captured CUDA graph: the device is cpu") == 1
        assert "evaluation after step 8, averaged weights" in log
        assert "done in" in log


def test_steps_that_are_launched_ahead_have_the_metrics_of_the_trainer(
    spec: str, tmp_path: Path, ahead: None
) -> None:
    folder = tmp_path / "sweep"
    plain = ["model.dropout=0"]
    assert sweep(spec, folder, *plain, "--seeds", "0,1") == 0
    for run in results(folder):
        expected = alone(spec, tmp_path / run["name"], *plain, f"training.seed={run['seed']}")
        assert files(Path(run["folder"])) == files(expected)
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            require_close(Path(run["folder"]) / name, expected / name)
        assert "eagerly" not in (folder / "logs" / f"{run['name']}.txt").read_text()


class Signal(threading.Thread):
    """Sends a signal to this process once a file has a line."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__()
        self._path, self._number = path, number
        self.start()

    def run(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (self._path.is_file() and self._path.stat().st_size > 0):
            time.sleep(0.01)
        os.kill(os.getpid(), self._number)


def run_one_by_one(
    jobs: Sequence[Job], *, ended: Callable[[Job, int, float], object], **options: Any
) -> None:
    """Run a queue of jobs without starting processes, which takes longer than the runs."""
    for job in jobs:
        ended(job, train(job.arguments), 1.0)


@pytest.mark.parametrize("launched", ["after", "ahead"])
def test_a_signal_saves_all_runs_and_either_way_continues_them(
    spec: str, tmp_path: Path, launched: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "sweep"
    longer = ["training.max_steps=12", "training.evaluate_every=null", "training.checkpoint_every=null"]
    longer += ["model.dropout=0"] if launched == "ahead" else []
    if launched == "ahead":
        request.getfixturevalue("ahead")
    arguments = [*longer, "--seeds", "0,1,2"]
    sender = Signal(folder / "runs" / "seed=1" / "metrics.jsonl", signal.SIGTERM)
    assert sweep(spec, folder, *arguments) == 75
    sender.join()
    for name in ("seed=0", "seed=1"):
        steps = len(rows(folder / "runs" / name / "metrics.jsonl"))
        assert 0 < steps < 12
        assert (folder / "runs" / name / "checkpoints" / f"step-{steps:08d}").is_dir()
        assert f"stopped after step {steps}" in (folder / "logs" / f"{name}.txt").read_text()
    assert not (folder / "runs" / "seed=2").exists()
    assert [run["status"] for run in results(folder)] == ["unfinished"] * 3

    # One of them continues as in the queue of processes, the others side by side.
    monkeypatch.setattr(command, "run_queue", run_one_by_one)
    assert main([spec, *longer, "--seeds", "0", "--output", str(folder), "--device", "cpu"]) == 0
    assert sweep(spec, folder, *arguments) == 0
    for seed in range(3):
        found = rows(folder / "runs" / f"seed={seed}" / "metrics.jsonl")
        expected = alone(spec, tmp_path / str(seed), *longer, f"training.seed={seed}") / "metrics.jsonl"
        if launched == "after":
            assert found == rows(expected)
        else:
            require_close(folder / "runs" / f"seed={seed}" / "metrics.jsonl", expected, rel=1e-3)
            average = folder / "runs" / f"seed={seed}" / "evaluations.jsonl"
            require_close(average, expected.with_name("evaluations.jsonl"), rel=1e-3)


def test_a_run_that_fails_takes_no_other_with_it(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.run.phases import ActivePhase

    load = ActivePhase.batch

    def broken(self: ActivePhase, step: int, first: int) -> Any:
        if self.phase.training.seed in (5, 6) and step == 2:
            raise ValueError("a bug") if self.phase.training.seed == 5 else SystemExit(9)
        return load(self, step, first)

    monkeypatch.setattr(ActivePhase, "batch", broken)
    folder = tmp_path / "sweep"
    grid = ["--grid", f"{RATE}=1e-3,1e30", "--seeds", "4,5,6"]
    assert sweep(spec, folder, *grid, side_by_side=6) == 1
    found = {(run["seed"], run["settings"][RATE]): run for run in results(folder)}
    assert found[4, 1e-3]["status"] == "finished"
    require_same_run(
        Path(found[4, 1e-3]["folder"]), alone(spec, tmp_path / "alone", "training.seed=4", f"{RATE}=1e-3")
    )
    assert (found[4, 1e30]["exit_code"], found[4, 1e30]["status"]) == (3, "failed")
    assert "diverged" in found[4, 1e30]["marks"][0]
    assert (found[5, 1e-3]["exit_code"], found[5, 1e-3]["reason"]) == (1, "ValueError: a bug")
    assert found[6, 1e-3]["exit_code"] == 1
    assert "called sys.exit(9) during the run" in found[6, 1e-3]["reason"]


def test_a_callback_ends_a_run_after_the_same_step(
    spec: str, tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "draw", draw)
    folder = tmp_path / "sweep"
    stop = ["callbacks=[{kind: stop_when, value: gradient_norm, above: 0, steps: 3}]", "model.dropout=0"]
    assert sweep(spec, folder, *stop, "--seeds", "0,1") == 0
    for run in results(folder):
        assert (run["steps"], run["status"]) == (3, "finished")
        assert run["marks"][0].startswith("ended early at step 3: gradient_norm")
        assert (Path(run["folder"]) / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_steps_before_one_without_data_are_made(
    spec: str, tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.data import prefetch

    load = prefetch.take

    def damaged(source: Any, position: int, count: int) -> Any:
        if position <= 30 < position + count:
            raise ValueError("sample 30 is damaged")
        return load(source, position, count)

    monkeypatch.setattr(prefetch, "take", damaged)
    assert sweep(spec, tmp_path / "sweep", "training.evaluate_every=null") == 1
    (run,) = results(tmp_path / "sweep")
    assert run["exit_code"] == 2
    assert run["reason"].startswith(
        "the data of step 4 can't be used: sample 30 is damaged; the last checkpoint,"
    )
    assert [row["step"] for row in rows(tmp_path / "sweep" / "runs" / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_one_thread_at_a_time_reads_the_data(
    spec: str, tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps that are launched ahead follow a phase whose batches were loaded ahead."""
    load, reading, clashes = WordProblemStream.batch, threading.Lock(), list[int]()

    def slow(source: WordProblemStream, position: int, count: int) -> Any:
        alone = reading.acquire(blocking=False)
        clashes.extend([] if alone else [position])
        time.sleep(0.1)
        if alone:
            reading.release()
        return load(source, position, count)

    monkeypatch.setattr(WordProblemStream, "batch", slow)
    monkeypatch.setattr(
        look_ahead,
        "why_phase_not_captured",
        lambda spec, phase, device: None if phase.name == "two" else "one",
    )
    assert sweep(spec, tmp_path / "sweep", "training.evaluate_every=null") == 0
    assert not clashes


@pytest.mark.parametrize("count", [1, 3])
def test_batches_that_are_not_finite_are_skipped_or_end_the_run(
    spec: str, tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The step after which a run ends, its metrics and its average do not depend on steps launched ahead."""
    from torch import nn

    clip, calls = nn.utils.clip_grad_norm_, []

    def spoiled(parameters: Sequence[Any], limit: float) -> Any:
        calls.append(None)
        norm = clip(parameters, limit)
        return norm * float("nan") if 4 <= len(calls) < 4 + count else norm

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", spoiled)
    skip = ["model.dropout=0", "training.non_finite=skip", "training.max_consecutive_skips=2"]
    code = sweep(spec, tmp_path / "sweep", *skip)
    calls.clear()
    arguments = ["--spec", spec, *skip, "--output", str(tmp_path / "alone"), "--device", "cpu"]
    assert (code, train(arguments)) == ((0, 0) if count == 1 else (0, 3))
    found = rows(tmp_path / "sweep" / "runs" / "run" / "metrics.jsonl")
    expected = rows(tmp_path / "alone" / "metrics.jsonl")
    assert [row["skipped"] for row in found] == [row["skipped"] for row in expected]
    assert len(found) == (8 if count == 1 else 5)
    require_close(tmp_path / "sweep" / "runs" / "run" / "metrics.jsonl", tmp_path / "alone" / "metrics.jsonl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--side-by-side", "0"], "--side-by-side must be at least 1, got 0"),
        (
            ["--side-by-side", "2", "--processes", "2"],
            "--side-by-side trains in one process; remove --processes",
        ),
        (["--side-by-side", "2", "--device", "cuda:99"], "not available"),
    ],
)
def test_an_invalid_request_is_refused(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([spec, "--output", str(tmp_path / "sweep"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "sweep" / "runs").exists()


STUCK = """
import sys, time
from trainer.run.phases import ActivePhase
from trainer.sweep.command import main

ActivePhase.batch = lambda *given: time.sleep(600)
sys.exit(main(sys.argv[1:]))
"""


def test_a_second_interrupt_does_not_wait_for_a_step(spec: str, tmp_path: Path, python: Any) -> None:
    folder = tmp_path / "sweep"
    arguments = ["-c", STUCK, spec, "--output", str(folder), "--device", "cpu", "--side-by-side", "2"]
    pid = python.start(arguments, cwd=Path(__file__).parents[2], outputs=tmp_path)
    end = time.monotonic() + 120
    while time.monotonic() < end and not (folder / "runs" / "run" / "spec.yaml").is_file():
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)
    time.sleep(1.05)
    os.kill(pid, signal.SIGINT)
    assert python.wait(pid, timeout=60.0) == 130
    assert "interrupted; continue by the same command" in (tmp_path / "stderr").read_text()
    assert results(folder)[0]["status"] == "unfinished"
