"""Loops per sequence and parameters without a gradient on two processes: layouts have the same losses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

MODEL: dict[str, Any] = {
    "kind": "implicit_lm",
    "d_model": 16,
    "n_layers": 1,
    "mixer": {"kind": "attention", "n_heads": 2},
    "prelude": {"n_layers": 1},
    "coda": {"n_layers": 1},
    "injection": {"kind": "concat"},
    "z_init": "zeros",
    "depth": {"kind": "uniform", "low": 1, "high": 5, "per": "sequence"},
    "gradient": {"kind": "last_loops", "loops": 2},
    "exit_gate": True,
    "objective": {"kind": "exit_expectation"},
    "at_evaluation": {"exit": {"kind": "fixed", "loops": 4}},
}
SPEC: dict[str, Any] = {
    "model": MODEL,
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 4,
        "batch_size": 8,
        "micro_batch_size": None,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
        "threads": 1,
    },
    "evaluation": {"lengths": [12], "identity_probabilities": [0.5], "sequences": 4, "batch_size": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp"},
    "fsdp_by_layer": {"kind": "fsdp", "unit": "layer"},
}


def spec_of(layout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    spec = deepcopy(SPEC)
    spec["training"]["distributed"] = layout
    spec["model"] |= changes
    return spec


UNREAD: dict[str, dict[str, Any]] = {
    "gate": {"objective": {"kind": "last"}},
    "start": {
        "z_init": {"kind": "learned", "init_std": 0.1},
        "exit_gate": False,
        "objective": {"kind": "last"},
    },
    "prelude": {
        "injection": {"kind": "none"},
        "z_init": "prelude",
        "tie_embeddings": False,
        "exit_gate": False,
        "objective": {"kind": "last"},
    },
}


@pytest.fixture(scope="module")
def found(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train every layout and every model with parameters that are not read, all on the same two ranks."""
    runs = {name: spec_of(layout) for name, layout in LAYOUTS.items()}
    for unread, changes in UNREAD.items():
        for name in ("ddp", "fsdp"):
            spec = runs[f"{unread}_{name}"] = spec_of(LAYOUTS[name], **changes)
            spec["training"]["max_steps"] = 2
    found: dict[str, Any] = processes("train_each", runs=runs, folder=str(tmp_path_factory.mktemp("runs")))[0]
    assert isinstance(found, dict), found
    return found


def test_layouts_agree_on_loops_per_sequence(found: dict[str, Any]) -> None:
    for name in LAYOUTS:
        assert len(found[name]["rows"]) == 4
        for row, other in zip(found[name]["rows"], found["ddp"]["rows"], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-6), name
            assert row["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4), name


@pytest.mark.parametrize("unread", UNREAD)
def test_parameters_that_a_step_does_not_reach_stop_no_layout(unread: str, found: dict[str, Any]) -> None:
    rows, expected = (found[f"{unread}_{name}"]["rows"] for name in ("fsdp", "ddp"))
    assert len(rows) == 2
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)
