"""Runs whose searches begin in 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from trainer.estimate.memory import estimate_memory
from trainer.reporting.metrics import read_metrics
from trainer.run import parts
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


def test_searches_in_8_bit_floats_end_at_the_same_fixed_points(small: Small, tmp_path: Path) -> None:
    tight = {"model.stopping": {"tolerance": 1e-6, "max_iterations": 100}, "training.max_steps": 4}
    for name, dtype in (("plain", None), ("quantized", "float8_e4m3fn")):
        build(small(tight | {"training.search_dtype": dtype}), output=tmp_path / name, device="cpu").train()
    plain, quantized = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "quantized"))
    assert [row["iterations"] for row in plain] != [row["iterations"] for row in quantized]
    for row, other in zip(plain, quantized, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)
        assert other["residual"] <= 1e-6


def test_the_estimate_of_memory_has_a_byte_per_weight(small: Small) -> None:
    plain, quantized = (
        estimate_memory(spec, spec.phase_specs()[0])
        for spec in (small(), small({"training.search_dtype": "float8_e4m3fn"}))
    )
    assert plain is not None
    assert quantized is not None
    assert 0 < quantized.quantized < plain.weights // 4
    assert quantized.total == plain.total + quantized.quantized


def test_models_and_layouts_that_lack_it_are_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small({"training.search_dtype": "float8_e4m3fn"})
    layout: Any = SimpleNamespace(resolved=SimpleNamespace(kind="fsdp"))
    monkeypatch.setattr(parts, "lay_out", lambda *_, **__: layout)
    ranks: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    with pytest.raises(ValueError, match=r"fsdp divides them; set training.search_dtype=null"):
        parts.lay_out_model(spec, nn.Linear(1, 1), ranks)
    monkeypatch.setattr("trainer.run.parts.registry.build", lambda *_, **__: nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"quantize_search; set training.search_dtype=null"):
        parts._model(spec)


@pytest.mark.parametrize(
    "model",
    [
        {"model.gradient": {"kind": "unrolled", "steps": 2}},
        {"model.gradient": {"kind": "last_loops", "loops": 2}, "model.depth": {"kind": "fixed", "loops": 3}},
        {
            "model": {
                "kind": "explicit_lm",
                "d_model": 16,
                "n_layers": 1,
                "mixer": {"kind": "mamba2", "head_dim": 8},
            }
        },
    ],
    ids=["unrolled", "last loops", "explicit"],
)
def test_runs_that_do_not_search_are_refused(small: Small, model: dict[str, Any], tmp_path: Path) -> None:
    spec = small(model | {"training.search_dtype": "float8_e4m3fn"})
    with pytest.raises(ValueError, match=r"does not offer .*search.*; set training.search_dtype=null"):
        build(spec, output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_one_phase_that_searches_suffices(small: Small, tmp_path: Path) -> None:
    unrolled = {"gradient": {"kind": "unrolled", "steps": 2}}
    phases = [{"name": "first", "until": 1, "model": unrolled}, {"name": "last"}]
    spec = small({"phases": phases, "training.search_dtype": "float8_e4m3fn"})
    assert build(spec, output=tmp_path / "run", device="cpu").model.backbone.quantized is not None
