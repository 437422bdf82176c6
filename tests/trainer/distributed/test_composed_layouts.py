"""Models with prelude, core and coda have the losses of one process in every layout."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.distributed import scenarios

SPEC: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 2,
        "layers": [
            {"mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}},
            {"mixer": {"kind": "attention", "n_heads": 2}, "mlp": {"kind": "swiglu", "d_ff": 24}},
        ],
        "prelude": {"n_layers": 1, "mixer": {"kind": "attention", "n_heads": 2}},
        "coda": {"n_layers": 1, "mixer": {"kind": "attention", "n_heads": 2}},
        "residual_scaling": {"kind": "layer_scale"},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 3,
        "batch_size": 8,
        # One micro-batch a step on every rank: each draws its own number of loops, equal on all ranks.
        "micro_batch_size": None,
        "max_grad_norm": 0.25,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
        "threads": 1,
    },
    "evaluation": {"lengths": [12], "identity_probabilities": [0.5], "sequences": 4, "batch_size": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "searched": {
        "injection": {"kind": "attractor"},
        "gradient": {"kind": "one_step_adjoint"},
        "stopping": {"tolerance": 0.07, "max_iterations": 6},
    },
    "looped": {
        "injection": {"kind": "concat"},
        "z_init": "zeros",  # the usual start is noise, which ranks draw for their own rows
        "depth": {"kind": "uniform", "low": 1, "high": 4},
        "gradient": {"kind": "last_loops", "loops": 2},
        "objective": {"kind": "iterates", "at": [2, "last"]},
        "at_evaluation": {"exit": {"kind": "fixed", "loops": 4}},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp"},
    "fsdp_by_layer": {"kind": "fsdp", "unit": "layer"},
}


def spec_of(model: dict[str, Any], distributed: dict[str, Any]) -> Any:
    spec = deepcopy(SPEC)
    spec["model"] |= model
    spec["training"]["distributed"] = distributed
    return spec


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MODELS["searched"], id="searched", marks=pytest.mark.slow),
        pytest.param(MODELS["looped"], id="looped"),
    ],
)
def test_losses_are_those_of_one_process(model: dict[str, Any], processes: Any, tmp_path: Path) -> None:
    expected = scenarios.train(spec_of(model, {}), str(tmp_path / "one"))
    runs = {name: spec_of(model, layout) for name, layout in LAYOUTS.items()}
    found = processes("train_each", runs=runs, folder=str(tmp_path / "two"))[0]
    for name in LAYOUTS:
        assert isinstance(found, dict), found
        for row, other in zip(found[name]["rows"], expected["rows"], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-6), name
            assert row["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4), name
        for row, other in zip(found[name]["evaluations"], expected["evaluations"], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-6), name
