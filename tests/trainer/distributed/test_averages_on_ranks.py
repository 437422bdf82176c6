"""The average of the weights over several ranks, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.load import read_model_tensors
from trainer.optim.ema import WeightAverage
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]
CHANGES = {
    "training.ema": {"decay": 0.5},
    "training.evaluate_every": 2,
    "training.schedule": {"kind": "constant"},
    "training.optimizer.learning_rate": 2e-2,
    "evaluation.lengths": [12],
    "model.at_evaluation.stopping.max_iterations": 4,
}
LAYOUTS: dict[str, Any] = {
    "ddp": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp"},
    "by_layer": {"kind": "fsdp", "unit": "layer"},
}


def test_averages_of_two_ranks_equal_those_of_one(small: Small, tmp_path: Path, processes: Any) -> None:
    """An evaluation between the steps must leave neither the average nor gathered copies in the model."""
    build(small(CHANGES), output=tmp_path / "one", device="cpu").train()
    specs = {
        name: small({**CHANGES, "training.distributed": layout}).model_dump(mode="json")
        for name, layout in LAYOUTS.items()
    }
    first, _ = processes("train_each", runs=specs, folder=str(tmp_path))
    assert isinstance(first, dict), first

    def losses(name: str, file: str) -> list[float]:
        return [row["loss"] for row in read_metrics(tmp_path / name / file)]

    one, *others = (
        read_model_tensors(list_checkpoints(tmp_path / name / "checkpoints")[-1])
        for name in ("one", *LAYOUTS)
    )
    for name, found in zip(LAYOUTS, others, strict=True):
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            assert losses(name, file) == pytest.approx(losses("one", file), abs=2e-5), (name, file)
        for key, tensor in one.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-4, rtol=0, msg=f"{name}: {key}")
    # One process resumes from the shards of two, with the same average.
    spec = small({**CHANGES, "training.max_steps": 6, "training.distributed": LAYOUTS["fsdp"]})
    run = build(spec, output=tmp_path / "fsdp", device="cpu", resume=True)
    assert isinstance(run.loop.average, WeightAverage)
    assert run.loop.average.updates == 4
    for key, tensor in run.loop.average.tensors.items():
        assert torch.equal(tensor, others[list(LAYOUTS).index("fsdp")][key])
    run.folder.release()
