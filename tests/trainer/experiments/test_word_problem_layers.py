"""The search for the smallest number of layers, with models of known accuracy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from trainer.experiments.word_problem import layers as layers_study
from trainer.experiments.word_problem.layers import run, summarize_run
from trainer.experiments.word_problem.settings import Settings
from trainer.reporting.pictures import new_figure
from trainer.storage.files import read_json


def row(length: int, p: float, accuracy: float) -> dict[str, Any]:
    more = ("iterations", "iterations_max", "residual", "residual_max", "non_converged", "diverged")
    return {
        "length": length, "identity_probability": p, "accuracy_last": accuracy, "accuracy": 0.1, "loss": 1.0,
        "token_converged": None, **dict.fromkeys(more),
    }  # fmt: skip


def finished(seed: int, tests: list[dict[str, Any]]) -> Any:
    one = dict.fromkeys(("parameters", "steps", "tokens", "seconds"), 1)
    return SimpleNamespace(summary={"evaluation": tests, "seed": seed, "device": "cpu", "chance": 0.5, **one})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the trained models: two layers solve up to length 8 (only with seed 1), none length 16."""
    runs: list[tuple[Any, ...]] = []

    def train(spec: Any, folder: Path, *, name: str, device: str) -> Any:
        runs.append(spec)
        _, layers, length, seed = spec
        solved = 0.9 if layers >= 2 and length <= 8 and seed == 1 else 0.5
        return finished(seed, [row(4 * length, 0.0, 1.0), row(length, 0.0, solved), row(length, 0.5, 1.0)])

    def vary_spec(base: str, *, model: str, layers: int, length: int, seed: int, **more: Any) -> Any:
        return model, layers, length, seed

    monkeypatch.setattr(layers_study, "train", train)
    monkeypatch.setattr(layers_study, "vary_spec", vary_spec)
    monkeypatch.setattr(layers_study, "draw", lambda written: new_figure(width=1, height=1, title=""))
    return runs


def test_layers_increase_from_those_of_the_previous_length(
    trained: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    settings = Settings(
        spec="x", groups=("S3",), models=("mamba2",), layers=(4, 1, 2), lengths=(8, 4, 16, 32),
        seeds=(0, 1, 2), sequences=1, threshold=0.9,
    )  # fmt: skip
    run(tmp_path, settings, device="cpu")
    written = read_json(tmp_path / "word_problem.json")
    assert [(one["length"], one["least_layers"]) for one in written["least_layers"]] == [
        (4, 2), (8, 2), (16, None)
    ]  # fmt: skip
    assert [(layers, length, seed) for _, layers, length, seed in trained] == [
        *((1, 4, seed) for seed in (0, 1, 2)),
        *((2, 4, seed) for seed in (0, 1)),  # the threshold itself counts, and ends the seeds
        *((2, 8, seed) for seed in (0, 1)),
        *((2, 16, seed) for seed in (0, 1, 2)),
        *((4, 16, seed) for seed in (0, 1, 2)),
    ]


def test_the_accuracy_that_counts_is_at_the_training_length_and_the_first_p() -> None:
    tests = [row(32, 0.2, 0.1), row(8, 0.2, 0.7), row(8, 0.5, 0.9)]
    summary = summarize_run(finished(3, tests), group="S3", model="llama", layers=2, length=8)
    assert (summary["accuracy_last"], summary["seed"], len(summary["tests"])) == (0.7, 3, 3)
    assert (
        summarize_run(finished(3, tests), group="S3", model="llama", layers=2, length=16)["accuracy_last"]
        == 0.1
    )
