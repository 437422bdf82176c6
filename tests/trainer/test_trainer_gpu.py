"""The trainer on CUDA: bfloat16, fused AdamW, and its state restored from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_in_two_parts_equals_the_whole(
    small: Callable[..., RunSpec], tmp_path: Path, precision: str
) -> None:
    spec = small({"training.precision": precision, "training.max_steps": 6, "model.dropout": 0.1})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = build(spec, output=whole).train()
    assert summary is not None
    assert summary["device"].startswith("cuda")
    build(spec, output=parts).train(stop_at=3)
    build(spec, output=parts, resume=True).train()
    # Not bit-identical: CUDA sums embedding gradients in no fixed order.
    tolerance = 1e-4 if precision == "float32" else 1e-2
    for row, other in zip(
        read_metrics(whole / "metrics.jsonl"), read_metrics(parts / "metrics.jsonl"), strict=True
    ):
        assert other["step"] == row["step"]
        assert other["loss"] == pytest.approx(row["loss"], rel=tolerance)


def test_an_unavailable_device_is_refused(small: Callable[..., RunSpec], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device 'cuda:99' is not available \(available devices: cpu, "):
        build(small(), output=tmp_path / "run", device="cuda:99")
