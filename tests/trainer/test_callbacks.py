"""Callbacks: their events, stopping a run early, and failures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from implicit_blocks import registry
from implicit_blocks.specs import SpecError
from trainer.callbacks import Callback, CallbackContext, CallbackDispatcher, Callbacks
from trainer.callbacks.stop_when import StopWhen
from trainer.distributed import Ranks
from trainer.errors import CallbackError
from trainer.reporting.metrics import read_metrics
from trainer.reporting.report import main as report
from trainer.run.build import build
from trainer.specs.run import CallbackSpec, RunSpec, StopWhenSpec

Small = Callable[..., RunSpec]


class SpySpec(CallbackSpec):
    """Record every event; fail at one of them."""

    kind: Literal["spy"] = "spy"
    fail_in: str = ""


class Spy(Callback):
    seen: list[str] = []  # noqa: RUF012  # of all spies, in the order of the calls

    def __init__(self, spec: SpySpec) -> None:
        self._spec = spec

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(run: CallbackContext, **details: Any) -> None:
            assert isinstance(run.folder, Path)
            self.seen.append(name)
            if name == self._spec.fail_in:
                raise KeyError("lost")

        return note


class NoCallbackSpec(CallbackSpec):
    """A spec whose builder returns no callback."""

    kind: Literal["no_callback"] = "no_callback"


@pytest.fixture(autouse=True)
def _kinds() -> Iterator[None]:
    with registry.isolated():
        registry.add("callback", SpySpec, Spy, owner="spies", version="7")
        registry.add("callback", NoCallbackSpec, lambda spec: [], owner="spies", version="7")
        Spy.seen = []
        yield


def test_stop_when_ends_the_run_when_a_value_exceeds_its_limit(small: Small, tmp_path: Path) -> None:
    stop = {"kind": "stop_when", "value": "loss", "below": 100.0, "steps": 2}
    run = build(small({"callbacks": [stop]}), output=tmp_path / "run", device="cpu")
    summary = run.train()
    assert summary is not None
    assert (summary["steps"], len(summary["evaluation"])) == (2, 2)
    assert summary["stopped"].startswith("loss ")
    assert summary["stopped"].endswith(" is below 100, for 2 steps")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == summary["stopped"]
    # Without the callback the run can be resumed to its end.
    summary = build(small(), output=tmp_path / "run", device="cpu", resume=True).train()
    assert summary is not None
    assert (summary["steps"], summary["stopped"]) == (4, None)
    build(small(), output=tmp_path / "whole", device="cpu").train()
    losses = [[row["loss"] for row in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("run", "whole")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("limit", "steps"), [({"above": 1e9}, 4), ({"above": 0.0, "steps": 3}, 3)], ids=["never", "third"]
)
def test_stop_when_counts_consecutive_steps(
    small: Small, tmp_path: Path, limit: dict[str, Any], steps: int
) -> None:
    spec = small({"callbacks": [{"kind": "stop_when", "value": "gradient_norm", **limit}]})
    summary = build(spec, output=tmp_path / "run", device="cpu").train()
    assert summary is not None
    assert summary["steps"] == steps


def test_a_step_within_the_limit_resets_the_count() -> None:
    reasons: list[str] = []
    watched = StopWhen(StopWhenSpec(value="loss", above=1.0, steps=2))
    run: Any = SimpleNamespace(stop=reasons.append)
    for loss in (2.0, 0.5, 2.0, None, 2.0, 1.0, math.inf, math.inf, 2.0, math.nan, 2.0):
        watched.on_step(run, row={"loss": loss})
    assert reasons == []
    watched.on_step(run, row={"loss": 3.0})
    assert reasons == ["loss 3 is above 1, for 2 steps"]


def test_the_first_stop_reason_and_the_first_failure_are_kept() -> None:
    callbacks = Callbacks()
    for reason in ("first", "second"):
        callbacks.stop(reason)
    assert callbacks.stop_reason == "first"

    def fail(event: str, run: Any) -> None:
        raise CallbackError(callback="mine", event=event, error=KeyError("lost"))

    class Pair(Ranks):
        def run_all(self, act: Callable[[], Any]) -> Any:
            return act()

    run: Any = None
    dispatcher = CallbackDispatcher(callbacks, run, ranks=Pair(torch.device("cpu"), rank=1, world_size=2))
    dispatcher.raise_failure()
    callbacks.call = fail  # type: ignore[assignment,method-assign]  # of no callback's own
    for event in ("on_step", "on_save"):
        dispatcher.notify(event)
        assert dispatcher.failed
    with pytest.raises(CallbackError, match="mine failed in on_step"):
        dispatcher.raise_failure()


def test_an_unknown_value_is_named_in_the_error(small: Small, tmp_path: Path) -> None:
    spec = small({"callbacks": [{"kind": "stop_when", "value": "acuracy", "above": 0.5}]})
    with pytest.raises(
        CallbackError, match=r"'stop_when' of implicit_blocks .*no value 'acuracy'; did you mean"
    ):
        build(spec, output=tmp_path / "run", device="cpu").train()


@pytest.mark.parametrize("limits", [{}, {"above": 1.0, "below": 0.0}], ids=["none", "both"])
def test_stop_when_takes_one_limit(small: Small, limits: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="give either above or below"):
        small({"callbacks": [{"kind": "stop_when", "value": "loss", **limits}]})


SHORT = {"evaluation.lengths": [12], "evaluation.sequences": 2}
EVENTS = ["on_start", "on_phase", "on_step", "on_evaluation", "on_save", "on_checkpoint", "on_end"]


@pytest.mark.parametrize("event", EVENTS)
def test_a_failure_names_the_callback_and_leaves_a_checkpoint(
    small: Small, tmp_path: Path, event: str
) -> None:
    spec = small({**SHORT, "callbacks": [{"kind": "spy", "fail_in": event}, {"kind": "spy"}]})
    run = build(spec, output=tmp_path / "run", device="cpu")
    with pytest.raises(CallbackError, match=f"'spy' of spies 7 failed in {event}: KeyError: 'lost'; fix it"):
        run.train()
    assert Spy.seen.count(event) >= 2, "the other one is called all the same"
    steps = run.loop.progress.step
    assert steps == {"on_start": 0, "on_phase": 0, "on_step": 1}.get(event, 4)
    assert (run.loop.last_checkpoint is not None) == (steps > 0)
    # The resumed run has the same end.
    if steps:
        summary = build(small(SHORT), output=tmp_path / "run", device="cpu", resume=True).train()
        assert summary is not None
        assert summary["steps"] == 4


@pytest.mark.parametrize("event", EVENTS)
def test_the_run_continues_without_an_optional_callback(
    small: Small, tmp_path: Path, event: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small({**SHORT, "callbacks": [{"kind": "spy", "fail_in": event, "required": False}]})
    assert build(spec, output=tmp_path / "run", device="cpu").train() is not None
    assert capsys.readouterr().out.count("the run continues without it") == 1
    assert Spy.seen[-1] == event


def test_a_builder_that_returns_no_callback_is_refused_before_writing(small: Small, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"callbacks\.0: callback 'no_callback' of spies 7 is built as list"):
        build(small({"callbacks": [{"kind": "no_callback"}]}), output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_run_of_one_step_is_plotted(small: Small, tmp_path: Path) -> None:
    """The phases are too short for labels; a warning of matplotlib would be an error here."""
    stop = {"kind": "stop_when", "value": "loss", "above": 0.0}
    phases = [{"name": "bounded", "until": 1}, {"name": "free"}]
    summary = build(small({"callbacks": [stop], "phases": phases}), output=tmp_path, device="cpu").train()
    assert summary is not None
    assert summary["stopped"].endswith("is above 0, for 1 step")
    assert report([str(tmp_path), "--output", str(tmp_path / "run.png")]) == 0
