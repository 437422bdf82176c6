"""``python -m trainer.sweep --side-by-side`` on a GPU: captured steps have the metrics of the trainer's."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_blocks.specs.tree import dump_yaml
from trainer.cli.train import main as train
from trainer.data.token_files import write_tokens
from trainer.experiments.equal_compute.recipes import Recipe, spec_of
from trainer.reporting.metrics import read_metrics
from trainer.run.captured_step import CapturedStep
from trainer.sweep.command import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SMALL: dict[str, Any] = {
    "width": 64, "learning_rate": 4e-3, "weight_decay": 1.5, "petaflops": 4e-6, "batch_size": 4,
    "length": 64, "vocab_size": 256, "precision": "float32",
}  # fmt: skip
RECIPES = {
    "llama": Recipe(**SMALL, family="llama", layers=(0, 2, 0)),
    "looped llama": Recipe(**SMALL, family="llama", layers=(1, 1, 1), loops=3),
    "looped llama, weight norm": Recipe(
        **SMALL, family="llama", layers=(1, 1, 1), loops=3, weight_norm=True
    ),
    "looped mamba2, muon": Recipe(
        **SMALL, family="mamba2", layers=(1, 1, 1), loops=2, optimizer="muon"
    ),
}  # fmt: skip
COMMON = [
    "training.max_steps=90", "training.ema={decay: 0.9, start: 10}", "training.evaluate_every=40",
    "training.checkpoint_every=35", "evaluation.sequences=16",
]  # fmt: skip


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each step of the runs side by side was captured when its launch ended."""
    run, found = CapturedStep.run, list[bool]()

    def observed(step: CapturedStep, count: int) -> None:
        run(step, count)
        found.append(bool(step.graphs))

    monkeypatch.setattr(CapturedStep, "run", observed)
    return found


def spec_file(recipe: Recipe, folder: Path) -> str:
    write_tokens(folder / "tokens.bin", np.random.default_rng(0).integers(0, 256, 6401), vocab_size=256)
    tree = spec_of(recipe, folder / "tokens.bin").model_dump(mode="json")
    validation = {**tree["data"], "validation_path": str(folder / "tokens.bin")}
    path = folder / "tiny.yaml"
    path.write_text(dump_yaml({**tree, "data": validation}), encoding="utf-8")
    return str(path)


def sweep(spec: str, folder: Path, *arguments: str) -> int:
    return main(
        [spec, *COMMON, "--output", str(folder), "--device", "cuda", "--side-by-side", "3", *arguments]
    )


def alone(spec: str, folder: Path, *overrides: str) -> Path:
    arguments = ["--spec", spec, *COMMON, *overrides, "--output", str(folder), "--device", "cuda"]
    assert train(arguments) == 0
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def require_close(folder: Path, expected: Path, rel: float, searching: tuple[str, ...] = ()) -> None:
    """Require the metrics and evaluations of another run, with numbers up to rounding.

    Rounding may change the iterations of the phases that are ``searching``.
    """
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        found, wanted = list(read_metrics(folder / name)), list(read_metrics(expected / name))
        assert [row.keys() for row in found] == [row.keys() for row in wanted]
        assert [row["step"] for row in found] == [row["step"] for row in wanted]
        for row, other in zip(found, wanted, strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=rel)
            for key in ("phase", "tokens", "samples", "learning_rate", "skipped", "weights"):
                assert row.get(key) == other.get(key), key
            if name == "metrics.jsonl":
                assert row["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=0.2)
                assert row["accuracy"] == pytest.approx(other["accuracy"], abs=0.05)
                if row["phase"] not in searching:
                    assert row["iterations"] == other["iterations"]


@pytest.mark.parametrize(("precision", "rel"), [("float32", 5e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("name", RECIPES)
def test_captured_runs_have_the_metrics_of_the_trainer(name, precision, rel, tmp_path, replays):
    spec, folder = spec_file(RECIPES[name], tmp_path), tmp_path / "sweep"
    chosen = f"training.precision={precision}"
    assert sweep(spec, folder, chosen, "--seeds", "0,1,2") == 0
    assert sum(replays) > 0.8 * len(replays)
    for seed in range(3):
        run, log = folder / "runs" / f"seed={seed}", (folder / "logs" / f"seed={seed}.txt").read_text()
        assert "eagerly" not in log
        expected = alone(spec, tmp_path / str(seed), chosen, f"training.seed={seed}")
        assert files(run) | {"report.png"} == files(expected) | {"report.png"}
        require_close(run, expected, rel)


def test_a_phase_that_cannot_be_captured_follows_and_precedes_captured_ones(tmp_path, replays):
    spec, folder = spec_file(RECIPES["looped llama"], tmp_path), tmp_path / "sweep"
    searches = "model: {gradient: {kind: phantom, steps: 1, damping: 0.8}, depth: {kind: until_converged}}"
    overrides = [
        f"phases=[{{name: a, until: 30}}, {{name: b, until: 60, {searches}}}, {{name: c}}]",
        "training.cuda_graphs=true",  # of the map, where the step is not captured
        "training.optimizer.learning_rate=1e-3",  # at 4e-3 seed 1 is unstable, and enlarges rounding
    ]
    assert sweep(spec, folder, *overrides, "--seeds", "0,1") == 0
    assert any(replays)
    for seed in range(2):
        log = (folder / "logs" / f"seed={seed}.txt").read_text()
        assert log.count("steps run eagerly, not as a captured CUDA graph: depth 'until_converged'") == 1
        expected = alone(spec, tmp_path / str(seed), *overrides, f"training.seed={seed}")
        require_close(folder / "runs" / f"seed={seed}", expected, 5e-3, searching=("b",))


def test_an_interrupted_sweep_continues_as_if_it_had_not_been(tmp_path):
    spec, folder = spec_file(RECIPES["looped llama"], tmp_path), tmp_path / "sweep"
    arguments = ["training.max_steps=600", "training.evaluate_every=null", "--seeds", "0,1,2"]
    metrics = folder / "runs" / "seed=2" / "metrics.jsonl"

    def stop() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and not (metrics.is_file() and metrics.stat().st_size > 0):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    code = sweep(spec, folder, *arguments)
    thread.join()
    assert code == 75
    assert 0 < len(list(read_metrics(metrics))) < 600
    assert sweep(spec, folder, *arguments) == 0
    for seed in range(3):
        expected = alone(spec, tmp_path / str(seed), *arguments[:2], f"training.seed={seed}")
        found = list(read_metrics(folder / "runs" / f"seed={seed}" / "metrics.jsonl"))
        wanted = list(read_metrics(expected / "metrics.jsonl"))
        assert [row["step"] for row in found] == [row["step"] for row in wanted] == list(range(1, 601))
        # Rounding of sums on the device grows over the steps.
        losses = [np.mean([row["loss"] for row in rows[-50:]]) for rows in (found, wanted)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
        assert "resumed" in (folder / "logs" / f"seed={seed}.txt").read_text()
