"""The tensors that each rank copies for a checkpoint, and the recorded durations."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.checkpoint import staging as checkpoint_staging
from trainer.checkpoint.staging import Staging, own_share
from trainer.distributed import Ranks
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_replicated_tensors_are_divided_among_the_ranks(world_size: int) -> None:
    tensors = {f"{size}": torch.zeros(size) for size in (64, 3, 40, 24, 16, 9, 31, 5)}
    shares = [own_share(tensors, Ranks(torch.device("cpu"), rank, world_size)) for rank in range(world_size)]
    assert Counter(name for share in shares for name in share) == Counter(tensors.keys())
    sizes = [sum(tensor.numel() for tensor in share.values()) for share in shares]
    assert max(sizes) <= max(64, sum(sizes) / world_size + 40)


def test_staging_memory_is_reused_for_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    unlocked: list[int] = []

    def lock(memory: torch.Tensor) -> bool:  # there is no GPU to lock pages for
        locked.append(memory.nbytes)
        return True

    monkeypatch.setattr(checkpoint_staging, "_lock", lock)
    monkeypatch.setattr(checkpoint_staging, "_unlock", lambda memory: unlocked.append(memory.nbytes))
    staging = Staging(torch.device("cuda"))
    assert staging.kept
    assert not Staging(torch.device("cpu")).kept
    assert not Staging(torch.device("cuda"), pin=False).kept
    weight, count = torch.nn.Parameter(torch.randn(4, 3)), torch.tensor(1.0)
    weight.note = {"kind": type(weight)}  # type: ignore[attr-defined]  # what hangs on tensors is not copied
    first = staging.stage({"weight": weight, "count": count})
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
        count.add_(1.0)
    assert torch.equal(first["weight"], before)
    assert first["count"] == 1.0
    second = staging.stage({"weight": weight, "count": count})
    assert second["weight"].data_ptr() == first["weight"].data_ptr()
    assert torch.equal(second["weight"], weight)
    assert second["count"] == 2.0
    assert (locked, unlocked) == ([512], [])
    third = staging.stage({"weight": weight, "count": count, "moment": torch.ones(5)})
    assert torch.equal(third["weight"], weight)
    assert torch.equal(third["moment"], torch.ones(5))
    assert (locked, unlocked) == ([512, 1024], [512])
    del staging, first, second, third
    gc.collect()
    assert unlocked == [512, 1024]


def test_unlockable_pages_are_logged_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = SimpleNamespace(cudart=lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(
        checkpoint_staging.torch, "cuda", SimpleNamespace(**vars(refusing), is_initialized=bool)
    )
    with caplog.at_level("WARNING"):
        staged = Staging(torch.device("cuda")).stage({"weight": torch.arange(6.0).view(2, 3)})
    assert torch.equal(staged["weight"], torch.arange(6.0).view(2, 3))
    assert "CUDA error 2" in caplog.text


def test_each_rank_writes_its_share_of_any_layout(processes: Any, tmp_path: Path) -> None:
    kinds = ["ddp", "fsdp", "hsdp"]
    for found in processes("save_kept_copies", kinds=kinds, folder=str(tmp_path)):
        assert list(found) == kinds
        for kind, (same, sizes) in found.items():
            assert same == [True, True, True], kind
            assert len(sizes) == 2, kind
            assert max(sizes) < 1.3 * min(sizes), kind


def test_the_duration_of_saves_is_recorded(small: Callable[..., Any], tmp_path: Path) -> None:
    spec = small({"training.checkpoint_every": 2, "training.max_steps": 5, "training.keep_checkpoints": 9})
    run = build(spec, output=tmp_path / "run", device="cpu")
    run.train()
    stalls = [row["save_stall_seconds"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert [stall > 0 for stall in stalls] == [False, False, True, False, True]  # in the row after each save
    saving = json.loads((tmp_path / "run" / "summary.json").read_text())["saving"]
    assert saving["checkpoints"] == 3  # the last one is at the end
    assert saving["gb"] == pytest.approx(
        sum(12 * parameter.numel() + 4 for parameter in run.model.parameters()) / 1e9
    )
    assert len(saving["seconds"]) == len(saving["staging_seconds"]) == 3
    rounding = 4 * 0.5e-4  # figures of four decimals
    assert sum(saving["staging_seconds"]) < saving["stall_seconds"] + rounding
    assert saving["stall_seconds"] > sum(stalls) - rounding  # with that of the last one
