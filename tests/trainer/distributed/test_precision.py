"""bfloat16, compiled layers and models of transformers on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.distributed import scenarios

LAYOUTS = {
    "ddp": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp"},
    "layer": {"kind": "fsdp", "unit": "layer"},
}


@pytest.fixture
def each(small: Any, processes: Any, tmp_path: Path) -> Any:
    """Return a function that trains a spec on one process, and on two in each layout."""

    def train(changes: dict[str, Any], layouts: Any = tuple(LAYOUTS), scenario: str = "train_each") -> Any:
        plain = small(changes).model_dump(mode="json")
        runs = {
            name: plain | {"training": plain["training"] | {"distributed": LAYOUTS[name]}} for name in layouts
        }
        if scenario == "train_each":
            single = scenarios.train(plain, str(tmp_path / "one"))
        else:
            single = processes(scenario, world_size=1, runs={"one": plain}, folder=str(tmp_path))[0]["one"]
        return single, processes(scenario, runs=runs, folder=str(tmp_path))[0]

    return train


def losses(run: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in run["rows"]]


def test_bfloat16_computes_with_float32_masters_norms_and_decays(each: Any) -> None:
    single, found = each({"training.precision": "bfloat16", "model.n_layers": 2, "training.max_steps": 2})
    for run in (single, *found.values()):
        # Rounding to bfloat16 differs with the size of a matrix product: equal to its precision.
        assert losses(run) == pytest.approx(losses(single), rel=2e-3)
        assert run["types"] == {
            "weights": ["float32"],
            "gradients": ["float32"],
            "products": ["bfloat16"],
            "decays_and_norms": ["float32"],
        }


@pytest.mark.slow
def test_compiled_layers_are_those_of_one_process(each: Any) -> None:
    changes = {"training.compile_layers": True, "model.n_layers": 2, "training.max_steps": 2}
    single, found = each(changes, scenario="train_each_compiled")
    for run in found.values():
        assert losses(run) == pytest.approx(losses(single), abs=1e-6)


def test_models_of_transformers_can_be_sharded(each: Any) -> None:
    pytest.importorskip("transformers", reason="models of transformers need transformers")
    config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"kind": "transformers", "architecture": "llama", "vocab_size": 6, "config": config}
    single, found = each({"model": model, "training.max_steps": 2}, layouts=("ddp", "fsdp"))
    for run in found.values():
        assert losses(run) == pytest.approx(losses(single), abs=1e-6)
