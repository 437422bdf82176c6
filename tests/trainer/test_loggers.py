"""The callbacks for TensorBoard, Weights & Biases and traces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.callbacks.loggers import TensorBoard
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec, TensorBoardSpec

Small = Callable[..., RunSpec]


def test_tensorboard_has_every_step_once_after_a_resume(small: Small, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra log is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = small({"callbacks": [{"kind": "tensorboard"}], "training.checkpoint_every": 2})
    build(spec, output=tmp_path / "run", device="cpu").train(stop_at=3)
    build(spec, output=tmp_path / "run", device="cpu", checkpoint="2").train()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    assert written == pytest.approx({step: row["loss"] for step, row in rows.items()})
    assert {"train/residual_p90", "train/non_converged", "train/tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )
    (perplexity,) = events.Scalars("evaluation/p0.5_L16/perplexity")
    assert perplexity.step == 4
    assert [image.step for image in events.Images("evaluation/p0.5_L16/iterations_by_position")] == [4]


def test_tensorboard_writes_every_n_steps() -> None:
    pytest.importorskip("tensorboard", reason="the extra log is not installed")
    written: list[int] = []
    callback = TensorBoard(TensorBoardSpec(every=3))
    callback._writer = SimpleNamespace(add_scalar=lambda name, value, step: written.append(step))
    run: Any = None
    for step in range(1, 8):
        callback.on_step(run, row={"step": step, "loss": 1.0})
    assert written == [3, 6]


class FakeWandb:
    """Replaces the part of wandb that the callback uses."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0

    def init(self, **options: Any) -> SimpleNamespace:
        self.inits.append(options)
        return SimpleNamespace(id=options["id"] or "abc123", log=self.log, finish=self.finish)

    def Image(self, pixels: Any) -> SimpleNamespace:  # wandb's name
        return SimpleNamespace(shape=pixels.shape)

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_continues_its_run_after_a_resume(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    spec = small({"callbacks": [{"kind": "wandb", "mode": "offline", "project": "p", "every": 2}]})
    build(spec, output=tmp_path / "run", device="cpu").train(stop_at=2)
    build(spec, output=tmp_path / "run", device="cpu", resume=True).train()
    first, second = fake.inits
    assert (first["id"], second["id"]) == (None, "abc123")
    assert first["project"] == "p"
    assert first["mode"] == "offline"
    assert first["config"]["training"]["max_steps"] == 4
    assert [step for step, _ in fake.logged] == [2, 4, 4]
    assert "train/loss" in fake.logged[0][1]
    assert "evaluation/p0.5_L12/loss" in fake.logged[2][1]
    pictures = [name for name in fake.logged[2][1] if name.endswith("/iterations_by_position")]
    assert pictures == ["evaluation/p0.5_L16/iterations_by_position"]  # of the longest set
    assert fake.logged[2][1][pictures[0]].shape[2] == 3
    assert fake.finished == 2


def test_a_missing_package_is_named(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    spec = small({"callbacks": [{"kind": "wandb"}]})
    with pytest.raises(ValueError, match=r"callbacks\.0: .*wandb is not installed; pip install wandb"):
        build(spec, output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_requested_steps_are_traced(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small({"callbacks": [{"kind": "profile", "start": 2, "steps": 2}]})
    build(spec, output=tmp_path / "run", device="cpu").train()
    trace = tmp_path / "run" / "profiles" / "steps-2-3.rank-0.json"
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert "aten::mm" in trace.with_suffix(".txt").read_text()
    assert "traced steps 2 to 3" in capsys.readouterr().out


@pytest.mark.parametrize(("start", "found"), [(4, ["steps-4-4.rank-0"]), (5, []), (100, [])])
def test_a_run_that_ends_early_logs_which_steps_were_traced(
    start: int, found: list[str], small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small(
        {
            "training.max_steps": 4,
            "callbacks": [{"kind": "profile", "start": start}],
            "evaluation.lengths": [12],  # the evaluation at the end is traced, too
            "evaluation.sequences": 2,
            "model.at_evaluation.stopping.max_iterations": 2,
        }
    )
    build(spec, output=tmp_path / "run", device="cpu").train()
    assert [path.stem for path in (tmp_path / "run").glob("profiles/*.json")] == found
    missing = f"no steps were traced: the run ended after step 4, before step {start}"
    expected = "traced steps 4 to 4" if found else missing
    assert expected in capsys.readouterr().out


def test_lengths_as_multiples_of_the_training_length(small: Small, tmp_path: Path) -> None:
    changes = {"model.at_evaluation.stopping.max_iterations": 2, "evaluation.sequences": 2}
    spec = small({**changes, "evaluation.lengths": [], "evaluation.length_multiples": [1, 2, 4, 8]})
    summary = build(spec, output=tmp_path / "run", device="cpu").train()
    assert summary is not None
    assert [row["length"] for row in summary["evaluation"]] == [12, 24, 48, 96]
    both = small({"evaluation.length_multiples": [1, 2]})
    assert both.evaluation.at(12).lengths == (12, 16)  # an explicit value takes precedence
