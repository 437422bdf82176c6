"""Random depths in runs: exact resume, phases that change the depth, weights of other depths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.load import read_model_tensors
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]

LOOPS = {"kind": "last_loops", "loops": 2}
RANDOM = {"kind": "uniform", "low": 1, "high": 5, "per": "sequence"}
DEPTHS: dict[str, list[dict[str, Any]]] = {
    "random": [RANDOM],
    "random-first": [RANDOM, {"kind": "fixed", "loops": 2}],
    "random-last": [{"kind": "until_converged"}, RANDOM],
    "random-twice": [RANDOM, {"kind": "fixed", "loops": 2}, {"kind": "poisson", "mean": 3, "maximum": 5}],
}


def run_spec(small: Small, depths: list[dict[str, Any]], **changes: Any) -> RunSpec:
    """Return a run whose phases of 3 steps have these depths; the last phase ends it."""
    phases: list[dict[str, Any]] = [
        {"name": f"phase-{number}", "until": 3 * number, "model": {"depth": depth}}
        for number, depth in enumerate(depths, 1)
    ]
    del phases[-1]["until"]
    return small(
        {
            "training.max_steps": 3 * len(depths),
            "training.checkpoint_every": 2,
            "model.gradient": LOOPS,
            "model.stopping.max_iterations": 3,
            "phases": phases if len(depths) > 1 else [],
            **({"model.depth": depths[0]} if len(depths) == 1 else {}),
            **changes,
        }
    )


def losses(folder: Path) -> list[tuple[Any, ...]]:
    return [
        tuple(row[key] for key in ("step", "loss", "iterations"))
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("depths", DEPTHS)
def test_a_resumed_run_continues_the_random_numbers(depths: str, small: Small, tmp_path: Path) -> None:
    spec = run_spec(small, DEPTHS[depths])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = build(spec, output=whole, device="cpu")
    run.train()
    for stop in range(2, spec.total_steps, 3):
        assert build(spec, output=parts, device="cpu", resume=parts.exists()).train(stop_at=stop) is None
    resumed = build(spec, output=parts, device="cpu", resume=True)
    resumed.train()
    assert losses(parts) == losses(whole)
    for (name, tensor), other in zip(
        run.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other), name
    draws = {"random": 3, "random-first": 3, "random-last": 3, "random-twice": 6}
    assert int(run.model.state_dict()["depth.draws"]) == draws[depths]


def test_the_weights_of_a_run_load_whatever_depth_its_last_phase_has(small: Small, tmp_path: Path) -> None:
    for name in ("random-first", "random-last"):
        run = build(run_spec(small, DEPTHS[name]), output=tmp_path / name, device="cpu")
        run.train()
        model = ib.load_model(tmp_path / name)
        ids = torch.randint(6, (2, 5))
        with torch.no_grad():
            torch.testing.assert_close(model(ids, loops=2).logits, run.model.eval()(ids, loops=2).logits)


def test_a_run_starts_from_the_weights_of_another_depth(small: Small, tmp_path: Path) -> None:
    first = tmp_path / "first"
    build(run_spec(small, [{"kind": "until_converged"}]), output=first, device="cpu").train()
    assert "depth.draws" not in read_model_tensors(list_checkpoints(first / "checkpoints")[-1])
    spec = run_spec(small, [RANDOM], **{"training.init_from": str(first)})
    run = build(spec, output=tmp_path / "second", device="cpu")
    run.train()
    assert int(run.model.state_dict()["depth.draws"]) == 3


def test_reconfiguring_keeps_an_unchanged_depth_and_carries_its_count() -> None:
    fields = {"vocab_size": 6, "d_model": 16, "n_layers": 1, "gradient": LOOPS}
    fields |= {"mixer": {"kind": "attention", "n_heads": 2}}
    spec = ib.ImplicitLMSpec.model_validate({**fields, "depth": RANDOM})
    model, ids = ib.build(spec).train(), torch.randint(6, (2, 5))
    model(ids)
    depth = model.depth
    model.reconfigure(spec.model_copy(update={"gradient": ib.LastLoopsSpec(loops=1)}))
    assert model.depth is depth
    model.reconfigure(ib.ImplicitLMSpec.model_validate({**fields, "depth": {"kind": "fixed", "loops": 2}}))
    model(ids)
    model.reconfigure(spec)
    model(ids)
    assert int(model.depth.draws) == 2
    plain = ib.build(ib.ImplicitLMSpec.model_validate(fields))
    assert "depth.draws" not in plain.state_dict()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert int(model.depth.draws) == 2
