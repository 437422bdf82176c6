"""A NaN or Inf loss or gradient ends the run, or its batch is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.data.source import IGNORED, Batch
from trainer.distributed import Layout, Ranks
from trainer.distributed.grid import Grid
from trainer.errors import DataError, NonFiniteLossError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.run.step import StepResult, training_step
from trainer.specs.distributed import ResolvedLayout
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


@pytest.fixture
def infinite_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the gradients and their norm infinite at given steps."""

    def make(*steps: int) -> None:
        clip, calls = Layout.clip, iter(range(1, 10**6))

        def broken(self: Layout, limit: float) -> torch.Tensor:
            if next(calls) in steps:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(math.inf)
            return clip(self, limit)

        monkeypatch.setattr(Layout, "clip", broken)

    return make


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(read_metrics(folder / "metrics.jsonl"))


def test_a_non_finite_loss_ends_the_run_and_names_the_samples(
    small: Small, tmp_path: Path, infinite_at: Callable[..., None]
) -> None:
    infinite_at(3)
    run = build(small(), output=tmp_path / "run", device="cpu")
    with pytest.raises(NonFiniteLossError, match=r"step 3 .*samples 16 to 23\); the update was not made; "):
        run.train()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_a_skipped_batch_makes_no_update_and_is_counted(
    small: Small, tmp_path: Path, infinite_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    skipping = {"training.non_finite": "skip", "training.max_steps": 6}
    infinite_at(2, 3, 5)
    run = build(small(skipping), output=tmp_path / "run", device="cpu")
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train(stop_at=1)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train(stop_at=3)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    progress = run.loop.progress
    assert (progress.skipped, progress.skipped_in_a_row, progress.samples) == (2, 2, 24)

    infinite_at(2)  # the fixture counts from 0 again: step 5
    again = build(small(skipping), output=tmp_path / "run", device="cpu", resume=True)
    summary = again.train()
    assert summary is not None
    assert summary["skipped"] == 3
    assert [row["skipped"] for row in rows(tmp_path / "run")] == [
        None, "gradient norm", "gradient norm", None, "gradient norm", None
    ]  # fmt: skip
    assert rows(tmp_path / "run")[1]["gradient_norm"] is None
    assert all(math.isfinite(tensor.abs().sum()) for tensor in again.model.state_dict().values())
    assert summary["phases"][0]["measured"]["skipped"] == 3
    shown = capsys.readouterr().out
    assert "samples 8 to 15); the update was not made; the batch is skipped (1 so far)" in shown


def test_too_many_consecutive_skips_end_the_run(
    small: Small, tmp_path: Path, infinite_at: Callable[..., None]
) -> None:
    infinite_at(*range(2, 10))
    changes = {"training.non_finite": "skip", "training.max_consecutive_skips": 2, "training.max_steps": 9}
    run = build(small(changes), output=tmp_path / "run", device="cpu")
    with pytest.raises(NonFiniteLossError, match=r"step 4 .* nor those of the previous 2 steps"):
        run.train()


def test_only_consecutive_skips_are_limited(
    small: Small, tmp_path: Path, infinite_at: Callable[..., None]
) -> None:
    infinite_at(2, 4, 6)
    changes = {"training.non_finite": "skip", "training.max_consecutive_skips": 1, "training.max_steps": 7}
    run = build(small(changes), output=tmp_path / "run", device="cpu")
    assert run.train() is not None
    assert (run.loop.progress.skipped, run.loop.progress.skipped_in_a_row) == (3, 0)


class MeanOfNone(torch.nn.Module):
    """A model whose loss is NaN without labels, like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Embedding(3, 3)

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor, return_logits: bool) -> Any:
        logits = self.head(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, predictions=logits.argmax(-1), solution=None)


class OneOfTwo(Ranks):
    """One of two ranks; the other rank has four labels and the same gradients."""

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return [number + 4.0 for number in numbers]

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)] * 2


def step_on(ranks: Ranks, labels: torch.Tensor) -> StepResult:
    model = MeanOfNone()
    return training_step(
        Layout(ResolvedLayout("none" if ranks.is_single else "ddp", 1), Grid.undivided(ranks), model, model),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Batch(inputs=torch.zeros_like(labels), labels=labels),
        precision="float32",
        micro_batch_size=1,
        max_grad_norm=None,
        last_tokens=1,
    )


def test_a_rank_without_a_label_takes_part() -> None:
    ranks = OneOfTwo(torch.device("cpu"), rank=1, world_size=2)
    result = step_on(ranks, torch.full((2, 3), IGNORED))
    assert (result.not_finite, result.loss, result.gradient_norm) == (None, 0.0, 0.0)


def test_micro_batches_without_a_label_are_left_out() -> None:
    labels = torch.tensor([[IGNORED] * 3, [1, 2, IGNORED]])
    result = step_on(Ranks(torch.device("cpu")), labels)
    assert result.not_finite is None
    assert result.loss > 0


def test_a_batch_without_a_label_is_rejected() -> None:
    labels = torch.full((2, 3), IGNORED)
    with pytest.raises(DataError, match=r"no token of the batch has a label: all 6 labels .*; increase"):
        step_on(Ranks(torch.device("cpu")), labels)
