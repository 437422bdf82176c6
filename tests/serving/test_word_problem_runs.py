"""Runs of word problems, served and reported with their task; the demo's models side by side."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks.serving.inspection import inspect
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.server import application, load
from implicit_blocks.serving.word_problem import word_problem_of
from trainer.run.build import build
from trainer.specs.groups import notation
from trainer.specs.run import RunSpec

ROOT = Path(__file__).resolve().parents[2]
MIXER = {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}
RUN: dict[str, Any] = {
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 8},
    "training": {
        "max_steps": 1,
        "batch_size": 2,
        "threads": 1,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
    },
    "evaluation": {
        "last_tokens": 4,
        "lengths": [8],
        "identity_probabilities": [0.5],
        "sequences": 2,
        "batch_size": 2,
    },
}
SMALL = ServerOptions(max_batch_size=2, max_seq_len=32)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of demos, with one whose runs have taken one step."""
    folder: Path = tmp_path_factory.mktemp("runs")
    for name in ("implicit", "explicit"):
        model = {"kind": f"{name}_lm", "d_model": 16, "n_layers": 1, "mixer": MIXER}
        run = build(
            RunSpec.model_validate({**RUN, "model": model}), output=folder / "demo-1" / name, device="cpu"
        )
        run.train()
    return folder


def test_a_report_of_a_run_has_the_products_and_marks(demo):
    report = inspect(demo / "demo-1" / "implicit", "3 0 1 5", compare=demo / "demo-1" / "explicit")
    assert report.word_problem is not None
    assert report.word_problem["permutations"][4] == [2, 0, 1]
    products = notation("S3").products([3, 0, 1, 5])
    for answer in report.answers:
        assert [token["product"]["token_id"] for token in answer.tokens] == products
        for token in answer.tokens:
            assert token["right"] == (token["prediction"]["token_id"] == token["product"]["token_id"])
            assert any(one["token_id"] == token["product"]["token_id"] for one in token["alternatives"])
    assert [answer.label for answer in report.answers] == ["implicit, tolerance 0.05", "explicit"]


def test_two_runs_are_served_by_their_names(demo):
    implicit, explicit = demo / "demo-1" / "implicit", demo / "demo-1" / "explicit"
    app = application(load(implicit, SMALL, compare=explicit))
    assert app.state.served.name == "implicit"
    assert app.state.served.card()["word_problem"]["names"][1] == "(2 3)"
    with pytest.raises(ValueError, match="two models have the name implicit"):
        load(implicit, SMALL, compare=implicit)
    with pytest.raises(ValueError, match="nowhere"):
        load(implicit, SMALL, compare=demo / "nowhere")


def test_a_source_without_a_task_has_none(tmp_path):
    assert word_problem_of(tmp_path) is None


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("play")


def test_play_serves_both_models_of_the_newest_demo(play, demo, monkeypatch, capsys):
    other = demo / "demo-2" / "implicit"  # newer, without its twin
    other.mkdir(parents=True, exist_ok=True)
    (other / "summary.json").touch()
    os.utime(other / "summary.json", (2e9, 2e9))
    commands: list[Any] = []
    monkeypatch.setattr("implicit_blocks.__main__.main", lambda given: commands.append(given) or 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert play.main(["--runs", str(demo), "--port", port, "--no-browser"]) == 0
    (command,) = commands
    folder = demo / "demo-1"
    assert command[:4] == ["serve", str(folder / "implicit"), "--compare", str(folder / "explicit")]
    assert command[5] != port
    assert f"http://127.0.0.1:{command[5]}" in capsys.readouterr().out


def test_play_without_a_demo_names_the_remedy(play, tmp_path, capsys):
    assert play.main(["--runs", str(tmp_path)]) == 2
    assert "make demo" in capsys.readouterr().err


def test_play_opens_no_browser_in_a_terminal(play, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not play.has_browser()
