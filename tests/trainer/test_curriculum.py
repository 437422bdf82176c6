"""Phases with their own batches: position, tokens, exact resume, dry run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.folder import read_state
from trainer.checkpoint.load import read_model_tensors
from trainer.data.source import Batch
from trainer.distributed import Ranks
from trainer.distributed.grid import Grid
from trainer.errors import NonFiniteLossError
from trainer.estimate.dry_run import dry_run_report
from trainer.reporting.display import Display
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.run.parts import make_parts
from trainer.run.phases import ActivePhase
from trainer.run.step import training_step
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]

GROWING: dict[str, Any] = {
    "training.max_steps": 9,
    "training.checkpoint_every": 2,
    "training.loader_threads": 2,
    "model.dropout": 0.1,  # draws from torch's generator at every step
    "phases": [
        {"name": "bounded", "until": "288 tokens", "model": {"gradient": {"kind": "unrolled", "steps": 2}}},
        {"name": "free", "training": {"batch_size": 12, "micro_batch_size": 4}},
    ],
}


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(read_metrics(folder / "metrics.jsonl"))


def losses(folder: Path) -> list[tuple[Any, ...]]:
    kept = ("step", "phase", "loss", "gradient_norm", "learning_rate", "iterations", "tokens", "samples")
    return [tuple(row[key] for key in kept) for row in rows(folder)]


@pytest.fixture(scope="module")
def whole(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder: Path = tmp_path_factory.mktemp("growing") / "run"
    build(small(GROWING), output=folder, device="cpu").train()
    return folder


def test_samples_and_tokens_are_counted_with_the_batch_of_each_phase(whole: Path) -> None:
    sizes = [8] * 3 + [12] * 6  # 3 steps of 8 x 12 tokens make 288
    assert [row["samples"] for row in rows(whole)] == [sum(sizes[: n + 1]) for n in range(9)]
    assert [row["tokens"] for row in rows(whole)] == [12 * sum(sizes[: n + 1]) for n in range(9)]
    assert [row["phase"] for row in rows(whole)] == ["bounded"] * 3 + ["free"] * 6
    progress = read_state(list_checkpoints(whole / "checkpoints")[-1])["progress"]
    assert (progress["phase"], progress["samples"], progress["tokens"]) == ("free", 96, 1152)


def test_the_changes_of_a_phase_apply_in_its_steps(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {
        "model": {"solver": {"kind": "anderson"}, "gradient": {"steps": 3}, "stopping": {"tolerance": 0.01}},
        "training": {"batch_size": 4, "max_grad_norm": 2.0, "optimizer": {"learning_rate": 1e-4}},
    }
    changes = {
        "training.max_steps": 4,
        "training.schedule": {"kind": "warmup_linear", "warmup": 0, "final_learning_rate": 0.0},
        "phases": [{"name": "bounded", "until": 2}, {"name": "free", **free}],
    }
    run = build(small(changes), output=tmp_path / "run", device="cpu")
    seen = []

    def step(layout: Any, optimizer: Any, batch: Batch, **options: Any) -> Any:
        model, rate = layout.model, optimizer.param_groups[0]["lr"]
        how = type(model.solver).__name__, model.gradient.steps, model.stopping.tolerance
        seen.append((*how, len(batch), options["max_grad_norm"], pytest.approx(rate, rel=1e-6)))
        return training_step(layout, optimizer, batch, **options)

    monkeypatch.setattr("trainer.run.loop.training_step", step)
    run.train()
    rates = [2e-3, 1.5e-3, 0.5e-4, 0.25e-4]  # falling to 0 at the end of the run, from each phase's own
    assert [row[-1] for row in seen] == rates
    assert [row["learning_rate"] for row in rows(tmp_path / "run")] == pytest.approx(rates)
    assert [row[:-1] for row in seen] == [("Picard", 1, 0.05, 8, 0.25)] * 2 + [
        ("Anderson", 3, 0.01, 4, 2.0)
    ] * 2


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_a_run_in_two_parts_equals_the_whole_in_either_phase(
    whole: Path, small: Small, tmp_path: Path, stop_at: int
) -> None:
    folder = tmp_path / "run"
    assert build(small(GROWING), output=folder, device="cpu").train(stop_at=stop_at) is None
    torch.rand(7)  # whatever happened in between
    build(small(GROWING), output=folder, device="cpu", resume=True).train()
    assert losses(folder) == losses(whole)
    one, other = (read_model_tensors(list_checkpoints(path / "checkpoints")[-1]) for path in (whole, folder))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_every_sample_is_loaded_once(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build(small({**GROWING, "training.loader_threads": 1}), output=tmp_path / "run", device="cpu")
    asked: list[tuple[int, int]] = []
    give = run.loop.active.data.batch

    def counting(position: int, count: int) -> Batch:
        asked.append((position, count))
        return give(position, count)

    monkeypatch.setattr(run.loop.active.data, "batch", counting)
    run.train()
    assert asked == [(8 * n, 8) for n in range(3)] + [(24 + 12 * n, 12) for n in range(6)]


def test_a_rank_prefetches_its_shares_of_the_next_batches(small: Small) -> None:
    spec = small(GROWING)
    parts = make_parts(spec, origin=None, processes=2)
    ranks = Ranks(torch.device("cpu"), rank=1, world_size=2)
    active = ActivePhase(
        spec, model=parts.model, sources=parts.sources, grid=Grid.undivided(ranks), display=Display()
    )
    ahead = active.own_ranges(1, 8)
    assert ahead == [(12, 4), (20, 4), (30, 6)]
    assert active.own_ranges(3, 24)[:1] == ahead[2:]


@pytest.mark.parametrize("step", range(1, 8))
def test_the_epochs_of_phases_with_other_data_add_up(small: Small, step: int) -> None:
    phases = [
        {"name": "a", "until": 2},
        {"name": "b", "until": 5, "training": {"batch_size": 4}},
        {"name": "c", "training": {"batch_size": 6}},
    ]
    spec = small({"training.max_steps": 7, "phases": phases})
    ten: Any = SimpleNamespace(concurrent=False, epochs=lambda position: {"": position / 10})
    five: Any = SimpleNamespace(concurrent=False, epochs=lambda position: {"": position / 5})
    ranks = Ranks(torch.device("cpu"))
    active = ActivePhase(
        spec, model=torch.nn.Module(), sources=[ten, ten, five], grid=Grid.undivided(ranks), display=Display()
    )
    active.enter(step - 1)  # directly, as in a resumed run
    sizes = [8, 8, 4, 4, 4, 6, 6][:step]
    expected = sum(sizes[:5]) / 10 + sum(sizes[5:]) / 5
    assert active.epochs(step, sum(sizes)) == {"": pytest.approx(expected)}


def test_a_nan_loss_names_the_samples_of_its_phase(small: Small, tmp_path: Path) -> None:
    run = build(small(GROWING), output=tmp_path / "run", device="cpu")
    run.train(stop_at=4)
    next(run.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(NonFiniteLossError, match="samples 36 to 47"):
        run.train()


def test_the_dry_run_shows_each_phases_batch(small: Small) -> None:
    report = dry_run_report(small(GROWING), name="growing", ranks=2, rate="96")
    for line in (
        "9 steps of batches by phase, 1.2k tokens in total",
        "8 x 12 = 96 tokens, micro-batches of 4",
        "12 x 12 = 144 tokens, micro-batches of 4",
        "3s at 96 tokens/s",
        "9s at 96 tokens/s",
    ):
        assert line in report, report
    with pytest.raises(ValueError, match=r"phase 'bounded': training\.batch_size 8 is not divisible"):
        dry_run_report(small(GROWING), name="growing", ranks=3)


LONGER: dict[str, Any] = {
    "training.max_steps": 6,
    "training.checkpoint_every": 2,
    "training.loader_threads": 2,
    "phases": [
        {"name": "short", "until": 3, "data": {"seq_len": 4, "identity_probability": 0.0}},
        {"name": "long", "training": {"batch_size": 4}},
    ],
}


def test_phases_with_their_own_data_resume_bit_by_bit(small: Small, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run = build(small(LONGER), output=one, device="cpu")
    asked: list[tuple[int, ...]] = []
    forward = run.model.forward

    def looking(inputs: torch.Tensor, **options: Any) -> Any:
        asked.append(tuple(inputs.shape))
        return forward(inputs, **options)

    run.model.forward = looking  # type: ignore[method-assign]  # of this object alone
    run.train()
    assert asked[:6] == [(8, 4)] * 3 + [(4, 12)] * 3
    assert [row["tokens"] for row in rows(one)] == [32, 64, 96, 144, 192, 240]
    assert [row["samples"] for row in rows(one)] == [8, 16, 24, 28, 32, 36]
    for stop_at in (2, 4):
        build(small(LONGER), output=other, device="cpu", resume=stop_at > 2).train(stop_at=stop_at)
    build(small(LONGER), output=other, device="cpu", resume=True).train()
    assert losses(one) == losses(other)
