"""The callback ``early_stopping``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from implicit_blocks.specs import SpecError
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.errors import CallbackError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import EarlyStoppingSpec, RunSpec

Small = Callable[..., RunSpec]


class Result:
    """An evaluation result of one value."""

    def __init__(self, value: float, name: str = "valid") -> None:
        metrics = ("loss", "accuracy_last", "sequence_accuracy", "token_within")
        self.row = {"set": name, **dict.fromkeys(metrics, value)}

    def as_row(self, *, by_position: bool) -> dict[str, Any]:
        return self.row


def evaluate(callback: EarlyStopping, values: list[float], folder: Path, **run: Any) -> list[str]:
    """Return the reasons for which the callback stops a run with these evaluations, at steps 1, 2, …."""
    reasons: list[str] = []
    spec = SimpleNamespace(total_steps=100)
    context: Any = SimpleNamespace(**{"stop": reasons.append, "is_main": True, "spec": spec, **run})
    context.folder = folder
    callback.on_start(context, step=0, checkpoint=None)
    for step, value in enumerate(values, 1):
        results: Any = [Result(value)]
        callback.on_evaluation(context, step=step, results=results)
    return reasons


@pytest.mark.parametrize(
    ("fields", "values", "stops"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 1.9], 0),
        ({"patience": 2}, [3.0, 2.0, 2.0, 2.1], 1),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.6], 1),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.4], 0),
        ({"patience": 1, "metric": "accuracy_last"}, [0.1, 0.2, 0.3], 0),
        ({"patience": 1, "metric": "accuracy_last"}, [0.1, 0.2, 0.2], 1),
        ({"patience": 1, "metric": "sequence_accuracy"}, [0.1, 0.2, 0.3], 0),
        ({"patience": 1, "metric": "sequence_accuracy"}, [0.3, 0.2], 1),
        ({"patience": 1, "metric": "token_within"}, [0.1, 0.2, 0.3], 0),
        ({"patience": 2}, [float("nan"), float("nan")], 1),
    ],
    ids=[
        "reset",
        "exhausted",
        "too little",
        "slow",
        "accuracy",
        "accuracy falls",
        "sequences",
        "sequences fall",
        "share",
        "nan",
    ],
)
def test_the_run_ends_after_evaluations_without_improvement(
    tmp_path: Path, fields: dict[str, Any], values: list[float], stops: int
) -> None:
    assert len(evaluate(EarlyStopping(EarlyStoppingSpec(**fields)), values, tmp_path)) == stops


def test_the_reason_names_the_metric_and_its_best_value(tmp_path: Path) -> None:
    (reason,) = evaluate(EarlyStopping(EarlyStoppingSpec(patience=1)), [2.5, 3.0], tmp_path)
    assert "loss" in reason
    assert "2.5 at step 1" in reason


def test_the_last_evaluation_of_a_run_does_not_end_it_early(tmp_path: Path) -> None:
    callback = EarlyStopping(EarlyStoppingSpec(patience=1))
    assert evaluate(callback, [2.0, 3.0], tmp_path, spec=SimpleNamespace(total_steps=2)) == []


def test_other_ranks_leave_the_decision_to_the_first(tmp_path: Path) -> None:
    assert evaluate(EarlyStopping(EarlyStoppingSpec(patience=1)), [2.0, 3.0], tmp_path, is_main=False) == []


STOPPING = {
    "callbacks": [{"kind": "early_stopping", "patience": 2, "min_delta": 100.0}],
    "training.evaluate_every": 1,
    "training.max_steps": 6,
    "evaluation.lengths": [12],
}


def test_a_stopped_run_is_evaluated_once_and_counts_on_after_a_resume(small: Small, tmp_path: Path) -> None:
    summary = build(small(STOPPING), output=tmp_path / "whole", device="cpu").train()
    assert summary is not None
    assert summary["steps"] == 3
    assert summary["stopped"].startswith("loss has not improved by 100 in 2 evaluations")
    rows = list(read_metrics(tmp_path / "whole" / "evaluations.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert summary["evaluation"][0]["loss"] == rows[-1]["loss"]

    build(small(STOPPING), output=tmp_path / "parts", device="cpu").train(stop_at=2)
    summary = build(small(STOPPING), output=tmp_path / "parts", device="cpu", resume=True).train()
    assert summary is not None
    assert summary["steps"] == 3
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["stopped"] is not None


def test_a_stopped_run_stays_ended_unless_its_condition_changes(small: Small, tmp_path: Path) -> None:
    first = build(small(STOPPING), output=tmp_path / "run", device="cpu").train()
    again = build(small(STOPPING), output=tmp_path / "run", device="cpu", resume=True).train()
    assert first is not None
    assert again is not None
    assert (again["steps"], again["stopped"]) == (3, first["stopped"])
    rows = list(read_metrics(tmp_path / "run" / "evaluations.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    patient = small({**STOPPING, "callbacks": [{**STOPPING["callbacks"][0], "patience": 3}]})
    summary = build(patient, output=tmp_path / "run", device="cpu", resume=True).train()
    assert summary is not None
    assert summary["steps"] == 4
    assert "in 3 evaluations" in summary["stopped"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": "los"}, "no metric 'los'; did you mean 'loss'"),
        ({"set": "p0.5"}, "no evaluation set 'p0.5'"),
    ],
    ids=["metric", "set"],
)
def test_an_unknown_metric_or_set_is_named(
    small: Small, tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    spec = small({**STOPPING, "callbacks": [{"kind": "early_stopping", **fields}]})
    with pytest.raises(CallbackError, match=words):
        build(spec, output=tmp_path / "run", device="cpu").train()


def test_early_stopping_needs_evaluations(small: Small, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"callbacks\.0: .*set training\.evaluate_every"):
        small({"callbacks": [{"kind": "early_stopping"}]})
    with pytest.raises(SpecError, match="patience"):
        small({**STOPPING, "callbacks": [{"kind": "early_stopping", "patience": 0}]})
    callback = EarlyStopping(EarlyStoppingSpec())
    run: Any = SimpleNamespace(folder=tmp_path, is_main=True)
    with pytest.raises(ValueError, match="add validation data"):
        callback.on_evaluation(run, step=1, results=[])
