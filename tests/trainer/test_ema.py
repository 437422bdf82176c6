"""The moving average of the weights: arithmetic, use, checkpoints, and invalid settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import implicit_blocks as ib
from implicit_blocks.checkpoints.find import list_checkpoints
from implicit_blocks.specs import SpecError
from trainer.checkpoint.load import read_model_tensors
from trainer.estimate.memory import estimate_memory
from trainer.optim.ema import WeightAverage
from trainer.reporting.metrics import read_metrics
from trainer.run.build import Run, build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]
EMA = {"training.ema": {"decay": 0.6}, "evaluation.lengths": [12], "training.schedule": {"kind": "constant"}}


def losses_of(folder: Path, file: str = "metrics.jsonl") -> list[float]:
    return [row["loss"] for row in read_metrics(folder / file)]


def averages_of(run: Run) -> dict[str, torch.Tensor]:
    assert isinstance(run.loop.average, WeightAverage)
    return run.loop.average.tensors


def test_updates_that_can_be_captured_equal_the_others() -> None:
    """With a late start, a skipped step, and an average that begins at a skipped step."""
    for skipped in ({4}, {3}, set[int]()):
        model = nn.Linear(3, 4)
        ours, theirs = (WeightAverage(model, decay=0.7, start=2) for _ in range(2))
        updates = torch.tensor(0.0)
        for step in range(1, 7):
            if step not in skipped:
                with torch.no_grad():
                    model.weight.add_(torch.randn_like(model.weight))
                theirs.update(step)
                ours.count(step)
            ours.capturable_update(torch.tensor(step), torch.tensor(float(step in skipped)), updates)
            assert ours.updates == theirs.updates == int(updates)
        torch.testing.assert_close(ours.tensors, theirs.tensors)


def test_an_update_on_the_device_has_the_share_of_a_slow_average() -> None:
    """1 minus a decay near 1 is rounded once, not after a rounded decay."""
    model, updates = nn.Linear(2, 2, bias=False), torch.zeros(())
    averages = [WeightAverage(model, decay=0.999999) for _ in range(2)]
    for step, value in enumerate((0.0, 1.0), 1):
        nn.init.constant_(model.weight, value)
        averages[0].update(step)
        averages[1].capturable_update(torch.tensor(step), torch.tensor(0.0), updates)
    found = [average.tensors["weight"] for average in averages]
    torch.testing.assert_close(found[0], torch.full((2, 2), 1e-6), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


def test_the_average_equals_torchs_averaged_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    average = WeightAverage(model, decay=0.7)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(1, 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(step)
        theirs.update_parameters(model)
    assert average.updates == int(theirs.n_averaged) == 4
    for name, parameter in theirs.module.named_parameters():
        assert torch.equal(average.tensors[name], parameter), name


def test_the_average_begins_with_a_copy_after_its_start() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, decay=0.9, start=1)
    average.update(1)
    assert average.updates == 0
    weight = nn.Parameter(torch.full((2, 2), 5.0))
    model.weight = weight
    with average.applied():
        assert torch.equal(model.weight, torch.full((2, 2), 5.0)), "without an average nothing changes"
    average.update(2)
    assert torch.equal(average.tensors["weight"], weight.detach())


def test_applied_weights_are_restored_exactly_even_after_an_error() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, decay=0.5)
    average.update(1)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update(2)
    weight, mean, address = model.weight.clone(), average.tensors["weight"].clone(), model.weight.data_ptr()

    def fail() -> None:
        with average.applied():
            assert torch.equal(model.weight, mean)
            assert model.weight.data_ptr() == address
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(model.weight, weight)
    assert torch.equal(average.tensors["weight"], mean)


def test_a_run_evaluates_and_stores_its_averaged_weights(small: Small, tmp_path: Path) -> None:
    run = build(small({**EMA, "training.export_every": 4}), output=tmp_path / "run", device="cpu")
    assert run.train() is not None
    trained = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    averages = averages_of(run)
    assert all(
        not torch.equal(averages[name], weight) for name, weight in trained.items() if weight.dim() > 1
    )
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    stored = read_model_tensors(checkpoint)
    loaded = ib.load_model(tmp_path / "run")
    exported = ib.load_model(tmp_path / "run" / "exports" / checkpoint.name)
    for name, average in averages.items():
        assert torch.equal(stored[name], average), name
        assert torch.equal(loaded.get_parameter(name), average), name
        assert torch.equal(exported.get_parameter(name), average), name
    rows = list(read_metrics(tmp_path / "run" / "evaluations.jsonl"))
    assert [row["weights"] for row in rows] == ["average"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights"] == "average"
    # Training equals that of a run without an average; evaluations are those of the stored average.
    without = build(small({**EMA, "training.ema": None}), output=tmp_path / "without", device="cpu")
    without.train()
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "without")
    (unaveraged,) = read_metrics(tmp_path / "without" / "evaluations.jsonl")
    assert "weights" not in unaveraged
    without.model.load_state_dict(stored)
    again = without.loop.evaluator.evaluate(step=9, phase="", interrupted=lambda: False)
    without.folder.evaluations.close()
    assert again is not None
    assert again[0].loss == pytest.approx(rows[0]["loss"], rel=1e-5) != pytest.approx(unaveraged["loss"])


@pytest.mark.parametrize("start", [0, 3], ids=["averaged", "before the start"])
def test_a_resumed_run_has_the_same_weights_and_average(small: Small, tmp_path: Path, start: int) -> None:
    spec = small({**EMA, "training.ema": {"decay": 0.6, "start": start}})
    whole = build(spec, output=tmp_path / "whole", device="cpu")
    whole.train()
    build(spec, output=tmp_path / "parts", device="cpu").train(stop_at=2)
    parts = build(spec, output=tmp_path / "parts", device="cpu", resume=True)
    parts.train()
    for found, expected in (
        (parts.model.state_dict(), whole.model.state_dict()),
        (averages_of(parts), averages_of(whole)),
    ):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        assert losses_of(tmp_path / "whole", file) == losses_of(tmp_path / "parts", file)


def test_an_average_may_begin_or_end_with_a_resume(small: Small, tmp_path: Path) -> None:
    plain = {key: value for key, value in EMA.items() if key != "training.ema"}
    for first, second in ((plain, EMA), (EMA, plain)):
        folder = tmp_path / str(len(first))
        build(small(first), output=folder, device="cpu").train(stop_at=2)
        run = build(small(second), output=folder, device="cpu", resume=True)
        run.train()
        assert getattr(run.loop.average, "updates", None) == (None if second is plain else 2)
    assert losses_of(tmp_path / "3") == losses_of(tmp_path / "2"), "the weights of training were resumed"


def test_the_average_begins_anew_where_an_extended_run_moves_its_start(small: Small, tmp_path: Path) -> None:
    share = {**EMA, "training.ema": {"decay": 0.6, "start": 0.5}}
    build(small(share), output=tmp_path / "run", device="cpu").train()
    longer = {**share, "training.max_steps": 12, "training.evaluate_every": 5}
    run = build(small(longer), output=tmp_path / "run", device="cpu", resume=True)
    run.train()
    rows = [row for row in read_metrics(tmp_path / "run" / "evaluations.jsonl") if row["step"] > 4]
    assert [(row["step"], row["weights"]) for row in rows] == [
        (5, "training"),
        (10, "average"),
        (12, "average"),
    ]
    assert run.loop.average is not None
    assert run.loop.average.updates == 6, "those of the steps after step 6"


def test_the_average_begins_anew_where_the_steps_before_a_moved_start_are_skipped(
    small: Small, tmp_path: Path
) -> None:
    share = {**EMA, "training.ema": {"decay": 0.6, "start": 0.5}, "training.non_finite": "skip"}
    build(small(share), output=tmp_path / "run", device="cpu").train()
    longer = {**share, "training.max_steps": 10, "training.evaluate_every": 5}
    run = build(small(longer), output=tmp_path / "run", device="cpu", resume=True)
    hook = run.model.register_forward_hook(_make_nan)
    run.train(stop_at=5)
    hook.remove()
    run.train()
    assert run.loop.average is not None
    assert run.loop.progress.skipped == 1
    assert run.loop.average.updates == 5, "those of the steps after step 5"


@pytest.mark.parametrize("optimizer", [False, True], ids=["weights", "with the optimizer"])
def test_another_run_begins_with_the_average_or_continues_the_training(
    small: Small, tmp_path: Path, optimizer: bool
) -> None:
    first = build(small(EMA), output=tmp_path / "first", device="cpu")
    first.train()
    start = {"path": str(tmp_path / "first"), "optimizer": optimizer}
    run = build(small({**EMA, "training.init_from": start}), output=tmp_path / "second", device="cpu")
    expected = dict(first.model.named_parameters()) if optimizer else averages_of(first)
    assert all(torch.equal(p, expected[name]) for name, p in run.model.named_parameters())
    assert bool(run.loop.optimizer.state) == optimizer
    run.folder.release()


def test_callbacks_see_the_averaged_weights_in_an_evaluation(small: Small, tmp_path: Path) -> None:
    run = build(small(EMA), output=tmp_path / "run", device="cpu")
    seen: list[dict[str, torch.Tensor]] = []

    def notify(event: str, **details: Any) -> None:
        seen.append({name: p.detach().clone() for name, p in run.model.named_parameters()})

    run.loop.evaluator._notify = notify
    run.train()
    (weights,) = seen
    assert all(torch.equal(weights[name], average) for name, average in averages_of(run).items())


def test_a_batch_that_is_skipped_does_not_enter_the_average(small: Small, tmp_path: Path) -> None:
    run = build(small({**EMA, "training.non_finite": "skip"}), output=tmp_path / "run", device="cpu")
    run.train(stop_at=2)
    hook = run.model.register_forward_hook(_make_nan)
    run.train(stop_at=3)
    hook.remove()
    run.train()
    assert isinstance(run.loop.average, WeightAverage)
    assert (run.loop.progress.skipped, run.loop.average.updates) == (1, 3)


def _make_nan(module: nn.Module, arguments: Any, output: Any) -> None:
    if module.training:
        output.loss.data.fill_(torch.nan)


def test_the_average_counts_in_the_estimate_of_memory(small: Small) -> None:
    with_average, without = (small(changes) for changes in (EMA, {}))
    memories = [estimate_memory(spec, spec.phase_specs()[0]) for spec in (with_average, without)]
    assert memories[0] is not None
    assert memories[1] is not None
    assert memories[0].average == memories[0].weights > memories[1].average == 0


@pytest.mark.parametrize(
    ("ema", "place", "words"),
    [
        ({"decay": 1.0}, "ema.decay", "less than 1"),
        ({"decay": 0.9, "start": 4}, "ema.start", "the run ends at step 4"),
        ({"decay": 0.9, "start": "400 tokens"}, "ema.start", "begin it earlier"),
        ({"dekay": 0.9}, "ema.dekay", "did you mean 'decay'"),
    ],
    ids=["decay", "start", "tokens", "key"],
)
def test_an_invalid_average_is_refused_with_its_place(
    small: Small, ema: dict[str, Any], place: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        small({"training.ema": ema})
    assert f"training.{place}" in str(caught.value)
