"""Ranks that divide heads or sequences train as one process does, and share its checkpoints."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_blocks.checkpoints.sharded import read_whole_tensors
from tests.trainer.distributed import scenarios
from trainer.data.tokens import write_tokens
from trainer.estimate.division import estimate_communication
from trainer.estimate.dry_run import dry_run_report
from trainer.estimate.memory import estimate_memory, resolve_layout
from trainer.evaluation.command import main as evaluate
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8, "bias": True}},
    "llama": {
        "mixer": {"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "qk_norm": "weighted"},
        "mlp": {"kind": "swiglu", "d_ff": 24, "bias": True},
        "tie_embeddings": False,
    },
}
STEPS = 8
SPEC: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 1,
        "gradient": {"kind": "phantom", "steps": 1, "damping": 0.8},
        # Some rows are done after a few iterations, some take all of them.
        "stopping": {"tolerance": 0.05, "max_iterations": 8},
        "at_evaluation": {"stopping": {"max_iterations": 6, "tolerance": 0.05}},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 8},
    "training": {
        "max_steps": STEPS,
        "batch_size": 4,
        "max_grad_norm": 0.25,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "threads": 1,
        "loader_threads": 0,
    },
    "evaluation": {"lengths": [8], "sequences": 3, "batch_size": 2, "last_tokens": 5},
}
DIVISIONS = ("tensor", "context")
COLUMNS = ("loss", "accuracy", "accuracy_last", "gradient_norm", "iterations", "iterations_p50", "residual")


def spec_of(model: str, *, distributed: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    spec = deepcopy(SPEC)
    spec["model"] |= MODELS[model]
    spec["training"] |= {"distributed": distributed or {}, **training}
    return spec


def train_alone(spec: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    build(RunSpec.model_validate(spec), output=folder, device="cpu").train()
    return list(read_metrics(folder / "metrics.jsonl"))


def assert_equal_rows(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row["tokens"] == other["tokens"]
        for name in COLUMNS:
            assert row[name] == pytest.approx(other[name], abs=1e-5), (row["step"], name)


def stored(folder: Path, *, step: int = STEPS) -> dict[str, torch.Tensor]:
    return read_whole_tensors(folder / "checkpoints" / f"step-{step:08d}")


@pytest.fixture(scope="module", params=list(MODELS))
def trained(request: Any, processes: Any, tmp_path_factory: Any) -> Any:
    """Return a model's rows on one process, those of two that divide it, and their folder."""
    folder = tmp_path_factory.mktemp("divided")
    alone = train_alone(spec_of(request.param), folder / "alone")
    runs = {name: spec_of(request.param, distributed={name: 2}) for name in ("tensor", "context")}
    return alone, processes("train_each", runs=runs, folder=str(folder)), folder


@pytest.mark.parametrize("layout", ["tensor", "context"])
def test_losses_of_two_ranks_are_those_of_one(trained: Any, layout: str) -> None:
    alone, (found, other), _ = trained
    assert len({row["iterations"] for row in alone}) > 1
    assert any(row["iterations"] < row["iterations_max"] for row in alone)  # rows stop one by one
    assert_equal_rows(found[layout]["rows"], alone)
    if layout == "tensor":  # each rank makes every call; an evaluation is not divided into parts of sequences
        assert found[layout]["calls"] == other[layout]["calls"]


@pytest.mark.parametrize("layout", ["tensor", "context"])
def test_checkpoints_of_two_ranks_are_those_of_one(trained: Any, layout: str) -> None:
    _, _, folder = trained
    expected, found = stored(folder / "alone"), stored(folder / layout)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        # AdamW turns the rounding of a gradient that is zero, such as a key bias's, into steps.
        close = torch.isclose(found[name].double(), tensor.double(), atol=1e-5).float().mean()
        assert close > 0.95, name


def test_checkpoints_pass_between_one_rank_and_two_exactly(
    trained: Any, request: Any, processes: Any, tmp_path: Path
) -> None:
    _, _, folder = trained
    model = request.node.callspec.params["trained"]
    there = {name: shutil.copytree(folder / "alone", tmp_path / f"to_{name}") for name in DIVISIONS}
    processes("save_again", runs={str(there[n]): spec_of(model, distributed={n: 2}) for n in DIVISIONS})
    for name in DIVISIONS:
        back = shutil.copytree(folder / name, tmp_path / f"from_{name}")
        scenarios.save_again(None, {str(back): spec_of(model)})
        for source, resaved in ((folder / "alone", there[name]), (folder / name, back)):
            expected, found = stored(source), stored(resaved, step=99)
            assert any(key.startswith("optimizer/") for key in expected)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(found[key], tensor), (name, key)


def test_the_evaluation_program_reads_divided_runs(trained: Any, tmp_path: Path) -> None:
    _, _, folder = trained
    write_tokens(tmp_path / "tokens.bin", np.arange(200) % 6, vocab_size=6)
    found = {}
    for name in ("alone", *DIVISIONS):
        arguments = ["--checkpoint", folder / name, "--tokens", tmp_path / "tokens.bin", "--device", "cpu"]
        arguments += ["--lengths", 8, "--limit", 3, "--output", tmp_path / name]
        assert evaluate([str(argument) for argument in arguments]) == 0
        (found[name],) = json.loads((tmp_path / name / "results.json").read_text())["lengths"]
    for name in DIVISIONS:
        assert found[name]["perplexity"] == pytest.approx(found["alone"]["perplexity"], rel=1e-4)


def test_evaluations_of_two_ranks_are_those_of_one(trained: Any) -> None:
    _, (found, _), folder = trained
    (expected,) = read_metrics(folder / "alone" / "evaluations.jsonl")
    for layout in ("tensor", "context"):
        (row,) = found[layout]["evaluations"]
        assert row["sequences"] == expected["sequences"]
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert row["accuracy"] == expected["accuracy"]


@pytest.mark.slow
def test_a_run_continues_in_other_layouts(processes: Any, tmp_path: Path) -> None:
    def spec(distributed: dict[str, Any]) -> dict[str, Any]:
        changed = spec_of("llama", distributed=distributed, max_steps=9)
        changed["training"]["ema"] = {"decay": 0.5}
        return changed

    alone = train_alone(spec({}), tmp_path / "alone")
    turns = [(3, spec({"tensor": 2})), (6, spec({"context": 2})), (8, spec({"kind": "fsdp"}))]
    turns.append((9, spec({"tensor": 2})))
    found, _ = processes("train_in_turns", turns=turns, folder=str(tmp_path / "turns"))
    assert_equal_rows(found, alone)


@pytest.mark.slow
def test_ranks_that_divide_heads_draw_the_same_random_numbers(processes: Any, tmp_path: Path) -> None:
    runs = {name: spec_of("mamba2", distributed={name: 2}, max_steps=1) for name in ("tensor", "context")}
    first, second = processes("look_at_layouts", runs=runs, folder=str(tmp_path))
    assert first["tensor"]["drawn"] == second["tensor"]["drawn"]
    assert first["context"]["drawn"] != second["context"]["drawn"]


def test_the_dry_run_knows_the_parameters_and_messages_of_a_rank(processes: Any, tmp_path: Path) -> None:
    runs = {}
    for model in MODELS:
        for name in DIVISIONS:
            spec = runs[f"{model}_{name}"] = spec_of(model, distributed={name: 2}, max_steps=1)
            spec["model"]["stopping"]["tolerance"] = 0.0  # all iterations, as the estimate assumes
    measured, _ = processes("count_traffic", runs=runs, folder=str(tmp_path))
    for name, spec in runs.items():
        run = RunSpec.model_validate(spec)
        resolved, (phase,) = resolve_layout(run, 2), run.phase_specs()
        assert resolved is not None
        sent = estimate_communication(phase, resolved, ranks=2)
        memory = estimate_memory(run, phase, ranks=2)
        assert sent is not None
        assert memory is not None
        assert memory.weights == 4 * measured[name]["parameters"]
        # Statistics of norms are left out: a number per token beside the 16 of this width.
        assert sent.heads + sent.sequences == pytest.approx(measured[name]["sent"], rel=0.2), name
        report = dry_run_report(run, name=name, ranks=2)
        assert f"2 ranks divide {'heads' if 'tensor' in name else 'sequences'}" in report
        assert "each rank sends" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    "distributed",
    [
        {"tensor": 2, "context": 2},
        {"tensor": 2, "kind": "fsdp"},
        {"tensor": 2, "kind": "ddp"},
        {"context": 2, "kind": "fsdp"},
        {"context": 4},
    ],
    ids=lambda layout: "-".join(f"{name}_{value}" for name, value in layout.items()),
)
@pytest.mark.parametrize("model", MODELS)
def test_losses_of_four_ranks_are_those_of_one(
    model: str, distributed: dict[str, Any], processes: Any, tmp_path: Path
) -> None:
    if model == "mamba2" and distributed.get("context") == 4:
        distributed = {"context": 2, "kind": "ddp"}  # parts of 2 tokens are shorter than the convolution
    alone = train_alone(spec_of(model), tmp_path / "alone")
    runs = {"divided": spec_of(model, distributed=distributed)}
    found = processes("train_each", world_size=4, runs=runs, folder=str(tmp_path))
    assert_equal_rows(found[0]["divided"]["rows"], alone)
    for name, tensor in stored(tmp_path / "alone").items():
        assert stored(tmp_path / "divided")[name].shape == tensor.shape


@pytest.mark.slow
def test_further_gradient_estimators_work_in_divided_layouts(processes: Any, tmp_path: Path) -> None:
    def spec(distributed: dict[str, Any], gradient: dict[str, Any]) -> dict[str, Any]:
        changed = spec_of("mamba2", distributed=distributed, max_steps=4, checkpoint_activations="layers")
        changed["model"]["gradient"] = gradient
        return changed

    gradients: dict[str, dict[str, Any]] = {
        "implicit_function": {
            "kind": "implicit_function",
            "stopping": {"tolerance": 1e-3, "max_iterations": 20},
        },
        "last_loops": {"kind": "last_loops", "loops": 2},
        "unrolled": {"kind": "unrolled", "steps": 3},
    }
    for name, gradient in gradients.items():
        alone = train_alone(spec({}, gradient), tmp_path / name)
        runs = {f"{name}_{by}": spec({by: 2}, gradient) for by in ("tensor", "context")}
        found = processes("train_each", runs=runs, folder=str(tmp_path))[0]
        for run in runs:
            assert_equal_rows(found[run]["rows"], alone)
