"""Every layout has the losses of one process, and no rank hangs."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.distributed import scenarios

MAMBA2 = {"mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}}
LLAMA = {
    "mixer": {"kind": "attention", "n_heads": 2},
    "mlp": {"kind": "swiglu", "d_ff": 24},
    "tie_embeddings": False,
}
MODELS = {"mamba2": MAMBA2, "llama": LLAMA}

SPEC: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 2,
        "gradient": {"kind": "phantom", "steps": 2, "damping": 0.8},
        # Some rows are done after a few iterations, some never: ranks iterate unequally often.
        "stopping": {"tolerance": 0.07, "max_iterations": 10},
        "at_evaluation": {"stopping": {"max_iterations": 8, "tolerance": 0.05}},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 2,
        "batch_size": 8,
        "micro_batch_size": 2,
        "max_grad_norm": 0.25,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
        "threads": 1,
    },
    "phases": [
        {
            "name": "bounded",
            "until": 1,
            "model": {"gradient": {"steps": 1}, "stopping": {"max_iterations": 4}},
        },
        {"name": "free", "training": {"optimizer": {"learning_rate": 1e-3}}},
    ],
    # 5 sequences: the ranks' shares of an evaluation differ
    "evaluation": {"lengths": [12], "identity_probabilities": [0.5], "sequences": 5, "batch_size": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "fsdp": {"kind": "fsdp"},
    "hsdp": {"kind": "hsdp", "shard_size": 1},
    "fsdp_by_layer": {"kind": "fsdp", "unit": "layer"},
    "fsdp_by_layer_fixed": {"kind": "fsdp", "unit": "layer", "stopping": "fixed_budget"},
}


def spec_of(model: dict[str, Any], *, distributed: dict[str, Any] | None = None, **training: Any) -> Any:
    spec = deepcopy(SPEC)
    spec["model"] |= model
    spec["training"] |= {"distributed": distributed or {}, **training}
    return spec


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]


def assert_equal_rows(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert losses(rows) == pytest.approx(losses(expected), abs=1e-6)
    for row, other in zip(rows, expected, strict=True):
        for name in ("step", "phase", "tokens", "accuracy", "accuracy_last", "learning_rate"):
            assert row[name] == other[name], name
        for name in ("gradient_norm", "iterations", "iterations_max", "residual", "non_converged"):
            assert row[name] == pytest.approx(other[name], rel=1e-4), name


FAST = {  # each layout for one model at least, and the usual ones for both; the others are slow
    "mamba2": list(LAYOUTS),
    "llama": ["auto", "fsdp", "fsdp_by_layer", "checkpointed", "checkpointed_by_layer"],
}


def run_of(model: str, layout: str) -> Any:
    if layout == "checkpointed":
        return spec_of(MODELS[model], distributed={"kind": "fsdp"}, checkpoint_activations="layers")
    if layout == "checkpointed_by_layer":
        by_layer = {"kind": "fsdp", "unit": "layer"}
        return spec_of(MODELS[model], distributed=by_layer, checkpoint_activations="steps")
    return spec_of(MODELS[model], distributed=LAYOUTS[layout])


def train_in(layouts: list[str], model: str, processes: Any, folder: Path) -> Any:
    """Return a model's run on one process, and on two in each layout."""
    expected = scenarios.train(spec_of(MODELS[model]), str(folder / "single"))
    runs = {layout: run_of(model, layout) for layout in layouts}
    return expected, processes("train_each", runs=runs, folder=str(folder))


def assert_equal_evaluations(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)
        for name in ("set", "sequences", "accuracy", "accuracy_last"):
            assert row.get(name) == other.get(name), name
        assert row["iterations"] == pytest.approx(other["iterations"], rel=1e-3)


@pytest.fixture(scope="module")
def trained(processes: Any, tmp_path_factory: Any) -> Any:
    """Return a function that returns the runs of a model on one and on two processes, trained once."""
    return functools.cache(
        lambda model: train_in(FAST[model], model, processes, tmp_path_factory.mktemp("layouts"))
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model, layouts in FAST.items() for layout in layouts],
)
def test_losses_are_those_of_one_process(trained: Any, model: str, layout: str) -> None:
    expected, (found, same) = trained(model)
    assert_equal_rows(found[layout]["rows"], expected["rows"])
    assert found[layout]["rows"] == same[layout]["rows"]  # one file, written by one rank
    assert_equal_evaluations(found[layout]["evaluations"], expected["evaluations"])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_in_the_other_layouts_are_those_of_one_process(
    model: str, processes: Any, tmp_path: Path
) -> None:
    layouts = {*LAYOUTS, "checkpointed", "checkpointed_by_layer"}.difference(FAST[model])
    expected, (found, same) = train_in(sorted(layouts), model, processes, tmp_path)
    for layout in layouts:
        assert_equal_rows(found[layout]["rows"], expected["rows"])
        assert found[layout]["rows"] == same[layout]["rows"]
        assert_equal_evaluations(found[layout]["evaluations"], expected["evaluations"])


def test_layouts_are_those_of_the_spec(trained: Any) -> None:
    _, (found, other) = trained("mamba2")
    assert {name: found[name]["layout"] for name in LAYOUTS} == {
        "auto": "ddp",  # on the CPU
        "fsdp": "fsdp",
        "hsdp": "hsdp",
        "fsdp_by_layer": "fsdp",
        "fsdp_by_layer_fixed": "fsdp",
    }
    assert not found["auto"]["shards"]
    for mine, its, whole in zip(
        found["fsdp"]["shards"], other["fsdp"]["shards"], found["hsdp"]["shards"], strict=True
    ):
        assert mine[0] + its[0] == whole[0]  # hsdp with groups of one rank holds everything


def test_ranks_stop_independently_unless_the_loop_communicates(trained: Any) -> None:
    _, (first, second) = trained("mamba2")
    for layout in ("auto", "fsdp", "hsdp"):
        assert first[layout]["calls"] != second[layout]["calls"]
    for layout in ("fsdp_by_layer", "fsdp_by_layer_fixed"):
        assert first[layout]["calls"] == second[layout]["calls"]
    assert first["fsdp_by_layer"]["calls"] < first["fsdp_by_layer_fixed"]["calls"]


def test_groups_of_ranks_that_share_the_state(processes: Any, tmp_path: Path) -> None:
    def spec(**distributed: Any) -> Any:
        return spec_of(LLAMA, distributed=distributed, micro_batch_size=None, max_steps=2)

    single = scenarios.train(spec(), str(tmp_path / "single"))
    runs = {"hsdp": spec(kind="hsdp", shard_size=2)}
    four = processes("train_each", world_size=4, runs=runs, folder=str(tmp_path))
    assert_equal_rows(four[0]["hsdp"]["rows"], single["rows"])
    first, second, third, fourth = (rank["hsdp"]["shards"] for rank in four)
    assert first == third
    assert second == fourth
    assert len({rank["hsdp"]["calls"] for rank in four}) > 1


def test_the_loss_is_the_mean_over_the_labels_of_all_ranks(processes: Any, tmp_path: Path) -> None:
    runs = {}
    for kind in ("ddp", "fsdp"):
        for size in (None, 1, 2):  # 2: micro-batches of 2 and of 1 sequence
            spec = spec_of(
                MAMBA2, distributed={"kind": kind}, micro_batch_size=size, batch_size=6, max_steps=2
            )
            spec["evaluation"]["sequences"] = 2
            spec["model"]["stopping"]["max_iterations"] = 4
            runs[f"{kind}_{size}"] = spec
    expected = scenarios.train(runs["ddp_None"], str(tmp_path / "single"), hide=True)["rows"]
    found = processes("train_each", runs=runs, folder=str(tmp_path), hide=True)[0]
    for name in runs:
        assert losses(found[name]["rows"]) == pytest.approx(losses(expected), abs=1e-6)
        assert [row["accuracy"] for row in found[name]["rows"]] == [row["accuracy"] for row in expected]


def test_weights_are_gathered_once_per_step(processes: Any, tmp_path: Path) -> None:
    def fixed(iterations: int, unit: str, **training: Any) -> Any:
        spec = spec_of(LLAMA, distributed={"kind": "fsdp", "unit": unit}, max_steps=2, **training)
        spec["model"]["stopping"] = {"tolerance": 0.0, "max_iterations": iterations}
        spec["model"]["gradient"] = {"kind": "phantom", "steps": 2}
        spec.pop("phases")
        spec["evaluation"]["sequences"] = 2
        return spec

    counts = processes(
        "count_gathers",
        runs={
            "model_2": fixed(2, "model"),
            "model_6": fixed(6, "model"),
            "model_6_in_one": fixed(6, "model", micro_batch_size=None),
            "layer_2": fixed(2, "layer", micro_batch_size=None),
            "layer_6": fixed(6, "layer", micro_batch_size=None),
        },
        folder=str(tmp_path),
    )[0]
    # One gather before the forward pass and one reduction after the backward pass, micro-batches or not.
    assert counts["model_2"] == counts["model_6"] == counts["model_6_in_one"] == [(1, 1)] * 2
    # With unit layer they grow with the iterations: two layers, four more iterations.
    (few, _), (many, _) = counts["layer_2"][0], counts["layer_6"][0]
    assert many - few == 2 * 4


def test_communication_randomness_and_memory_of_a_layout(processes: Any, tmp_path: Path) -> None:
    runs = {
        kind: spec_of(MAMBA2, distributed={"kind": kind}, batch_size=9, micro_batch_size=1)
        for kind in ("ddp", "fsdp")
    }
    every = processes("look_at_layouts", world_size=3, runs=runs, folder=str(tmp_path))
    one = every[0]
    assert [found["ddp"]["exchanges"] for found in every] == [[0]] * 3  # once for all three micro-batches
    for kind in runs:  # as masks of dropout are
        assert len({tuple(found[kind]["drawn"]) for found in every}) == 3
    assert {one["fsdp"][when] for when in ("kept", "then")} == {"DTensor"}
    assert one["fsdp"]["gathered"] != "DTensor"


def test_each_rank_solves_an_exact_gradient_independently(processes: Any, tmp_path: Path) -> None:
    spec = spec_of(MAMBA2, max_steps=2, micro_batch_size=None)
    spec.pop("phases")
    spec["model"]["gradient"] = {
        "kind": "implicit_function",
        "stopping": {"tolerance": 1e-3, "max_iterations": 20},
    }
    runs = {"ddp": spec, "fsdp": spec | {"training": spec["training"] | {"distributed": {"kind": "fsdp"}}}}
    single = scenarios.train(spec, str(tmp_path / "one"))
    two = processes("train_each", runs=runs, folder=str(tmp_path))
    for layout in runs:
        assert_equal_rows(two[0][layout]["rows"], single["rows"])
