"""Damaged runs: the older checkpoint, or an error with the place and the remedy; never a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import implicit_blocks as ib
from trainer.cli.train import main
from trainer.reporting.metrics import MetricsFile, read_metrics
from trainer.reporting.report import main as report
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.files import digest, read_json, sha256_of, write_json

Small = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def stopped(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that was stopped at step 3 of 4, with checkpoints of steps 2 and 3."""
    folder: Path = tmp_path_factory.mktemp("stopped") / "run"
    changes = {"evaluation.lengths": [12], "evaluation.sequences": 2}
    spec = small({**changes, "training.checkpoint_every": 1, "training.keep_checkpoints": 2})
    build(spec, output=folder, device="cpu").train(stop_at=3)
    return folder


@pytest.fixture
def damaged(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the same run, finished."""
    folder = Path(shutil.copytree(stopped, tmp_path_factory.mktemp("finished") / "run"))
    assert resume(folder) == 0
    return folder


def resume(folder: Path) -> int:
    return main(["--resume", "--output", str(folder), "--device", "cpu"])


def seal(path: Path, state: dict[str, Any]) -> None:
    state.pop("digest", None)
    write_json(path / "state.json", {**state, "digest": digest(state)})


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [],
    "null": lambda state: None,
    "a number": lambda state: 3,
    "empty": lambda state: {},
    "nested": lambda state: json.loads("[" * 500 + "]" * 500),
    "no format": lambda state: {key: value for key, value in state.items() if key != "format"},
    "no progress": lambda state: {**state, "progress": []},
    "another progress": lambda state: {**state, "progress": {"step": 3}},
    "a step in words": lambda state: {**state, "progress": {**state["progress"], "step": "three"}},
    "a negative step": lambda state: {**state, "progress": {**state["progress"], "step": -3}},
    "no files": lambda state: {**state, "files": None},
    "files of another kind": lambda state: {**state, "files": {"__0_0.distcp": 7}},
    "aliases of another kind": lambda state: {**state, "aliases": {"a": 1}},
    "ranks of another kind": lambda state: {**state, "ranks": "1"},
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_an_invalid_state_falls_back_to_the_older_checkpoint(
    damaged: Path, change: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    newest = damaged / "checkpoints" / "step-00000003"
    made = change(read_json(newest / "state.json"))
    if isinstance(made, dict) and made:
        seal(newest, made)
    else:
        (newest / "state.json").write_text(json.dumps(made))
    assert resume(damaged) == 0
    message = capsys.readouterr().out
    assert f"WARNING: checkpoint {newest}" in message
    assert "resuming from step-00000002" in message


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a": ' * 100_000, "\ufeff{}", "NaN"])
def test_a_state_that_cannot_be_parsed(damaged: Path, content: str) -> None:
    (damaged / "checkpoints" / "step-00000003" / "state.json").write_text(content)
    with pytest.warns(UserWarning, match="reading step-00000002 instead"):
        ib.load_model(damaged)
    assert resume(damaged) == 0


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"random_state": {"python": [3, [1], null]}}', '{"random_state": 7}', "x"],
)
def test_invalid_states_of_random_number_generators(
    damaged: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged / "checkpoints" / "step-00000003"
    (path / "rank-00000.json").write_text(content)
    state = read_json(path / "state.json")
    file = path / "rank-00000.json"
    state["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    seal(path, state)
    assert resume(damaged) == 2
    message = capsys.readouterr().err
    assert "rank-00000.json has no valid states of the random number generators" in message
    assert "resume from another checkpoint by --checkpoint" in message


LINES = {
    "torn": b'{"step": 2, "lo',
    "no object": b"[1, 2]",
    "a number": b"7",
    "no step": b'{"loss": 1.0}',
    "a step in words": b'{"step": "two", "loss": 1.0}',
    "no phase": b'{"step": 2, "loss": 1.0}',
    "a phase of another kind": b'{"step": 2, "loss": 1.0, "phase": []}',
    "a loss in words": b'{"step": 2, "phase": "", "loss": "low", "step_seconds": 1, "tokens_per_second": 1}',
    "a huge number": b'{"step": 2, "phase": "train", "loss": 1' + b"0" * 500 + b"}",
    "no text": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
    "empty": b"",
}


def test_damaged_lines_in_the_middle_of_the_metrics_are_ignored(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        path = damaged / name
        lines = path.read_bytes().splitlines() if path.exists() else []
        path.write_bytes(b"\n".join([*lines[:1], *LINES.values(), *lines[1:]]) + b"\n")
    assert resume(damaged) == 0
    message = capsys.readouterr().out
    for number in (2, 3, 4):
        (warning,) = re.findall(rf"WARNING: {damaged / 'metrics.jsonl'}, line {number}: .*", message)
        assert warning.endswith("; the summary ignores it")
    assert f"WARNING: and {len(LINES) - 3} more damaged lines" in message
    assert sum(phase["measured"]["steps"] for phase in read_json(damaged / "summary.json")["phases"]) == 4


@pytest.mark.parametrize("damage", [name for name in LINES if name != "no phase"])
def test_a_report_refuses_a_damaged_line(
    finished: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "run")) / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:1], LINES[damage], *lines[1:]]) + b"\n")
    assert report([str(path.parent), "--output", str(tmp_path / "out.png")]) == 2
    error = capsys.readouterr().err
    assert f"{path}, line 2: " in error
    assert "repair the line, or remove it" in error


@pytest.mark.parametrize("damage", ["torn", "no object"])
def test_a_damaged_line_at_the_end_of_the_metrics_is_removed(damaged: Path, damage: str) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (damaged / name).open("ab") as file:
            file.write(LINES[damage])
    assert resume(damaged) == 0
    assert {row["step"] for row in read_metrics(damaged / "metrics.jsonl")} == {1, 2, 3, 4}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_truncating_the_metrics_removes_any_damaged_last_line(damaged: Path, line: bytes) -> None:
    path = damaged / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(line)
    MetricsFile(path).truncate_after(3)
    assert {row["step"] for row in read_metrics(path)} == {1, 2, 3}


def test_metrics_that_end_before_the_checkpoint(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged / "metrics.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert resume(damaged) == 0
    assert (
        f"WARNING: {path} ends at step 1, but the checkpoint is of step 3: the metrics of 2 steps are missing"
    ) in capsys.readouterr().out


def test_an_intact_run_is_resumed_without_a_warning(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(damaged) == 0
    assert "WARNING" not in capsys.readouterr().out


def test_changed_package_versions_are_warned_of(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_json(damaged / "manifest.json")
    now = manifest["versions"]["torch"]
    manifest["versions"] |= {"torch": "1.0.0", "matplotlib": "0.1"}
    write_json(damaged / "manifest.json", manifest)
    assert resume(damaged) == 0
    message = capsys.readouterr().out
    assert f"versions have changed since the last start: torch 1.0.0 → {now};" in message
    assert "matplotlib" not in message


@pytest.mark.parametrize(
    "content",
    ["[]", "7", '{"resumed": 3}', '{"resumed": [3]}', '{"data": 3}', '{"versions": []', "[" * 100_000],
)
def test_an_invalid_manifest_is_refused(
    damaged: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / "manifest.json").write_text(content)
    assert resume(damaged) == 2
    assert "manifest.json" in (message := capsys.readouterr().err)
    assert "move it away to continue" in message


@pytest.mark.parametrize("content", ["[]", "{}", "7", '{"name": "x"', '{"name": 3}', "[" * 100_000])
def test_an_invalid_summary_is_refused(
    damaged: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / "summary.json").write_text(content)
    assert report([str(damaged), "--output", str(damaged / "out.png")]) == 2
    assert f"error: {damaged / 'summary.json'} is " in capsys.readouterr().err
