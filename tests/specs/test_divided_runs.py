"""Runs that ranks cannot divide are refused with the number of ranks, the obstacle and a remedy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from implicit_blocks.mixers import AttentionSpec, HybridSpec, Mamba2Spec
from implicit_blocks.specs.tree import SpecError
from trainer.specs.distributed import DistributedSpec, ResolvedLayout
from trainer.specs.run import RunSpec

ATTENTION = {"kind": "attention", "n_heads": 4, "n_kv_heads": 2}
SPEC: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 32,
        "n_layers": 1,
        "mixer": ATTENTION,
        "mlp": {"kind": "swiglu", "d_ff": 24},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {"max_steps": 2, "batch_size": 8, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}},
    "evaluation": {"sequences": 4},
}


def spec_of(distributed: dict[str, Any], **sections: dict[str, Any]) -> RunSpec:
    spec = deepcopy(SPEC)
    for name, changes in sections.items():
        spec[name] |= changes
    spec["training"]["distributed"] = distributed
    return RunSpec.model_validate(spec)


def mamba2(**fields: Any) -> dict[str, Any]:
    return {"mixer": {"kind": "mamba2", "head_dim": 8, "d_state": 8, **fields}, "mlp": None}


@pytest.mark.parametrize(
    ("tensor", "sections", "facts"),
    [
        (4, {}, ("n_kv_heads", "2")),
        (3, {}, ("n_heads", "4")),
        (2, {"model": {"mlp": {"kind": "swiglu", "d_ff": 25}}}, ("d_ff", "25")),
        (3, {"model": mamba2()}, ("heads", "8")),
        (4, {"model": mamba2(n_groups=2)}, ("n_groups", "2")),
        (4, {"model": mamba2(norm_groups=2)}, ("norm_groups", "2")),
        (2, {"model": {"layers": [{"mixer": ATTENTION}, mamba2()["mixer"]]}}, ()),
        (2, {"training": {"optimizer": {"kind": "muon", "learning_rate": 1e-3}}}, ("muon", "adamw")),
        (2, {"training": {"cuda_graphs": True}}, ("training.cuda_graphs",)),
        (2, {"training": {"compile_layers": True}}, ("training.compile_layers",)),
        (2, {"training": {"search_dtype": "float8_e4m3fn"}}, ("training.search_dtype",)),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(
    tensor: int, sections: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of({"tensor": tensor}, **sections)
    message = str(refused.value)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize(
    ("context", "sections", "facts"),
    [
        (5, {}, ("data.seq_len", "12")),
        (6, {"model": mamba2(d_conv=4)}, ("parts of 2 tokens", "3 inputs")),
        (2, {"model": {"mixer": {**ATTENTION, "causal": False}}}, ("attention", "causal")),
        (2, {"model": {"solver": {"kind": "anderson"}}}, ("model.solver", "anderson", "picard")),
        (2, {"model": {"stopping": {"scope": "prefix"}}}, ("scope", "prefix")),
        (2, {"model": {"window_length": 4}}, ("window_length", "4")),
        (2, {"model": {"gradient": {"kind": "one_step_adjoint"}}}, ("one_step_adjoint", "phantom")),
        (
            2,
            {"model": {"gradient": {"kind": "implicit_function", "solver": {"kind": "anderson"}}}},
            ("model.gradient.solver", "anderson"),
        ),
    ],
)
def test_sequences_that_ranks_cannot_divide_are_refused(
    context: int, sections: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of({"context": context}, **sections)
    message = str(refused.value)
    assert "set context to 1" in message
    for fact in facts:
        assert fact in message


def test_layers_gathered_one_by_one_cannot_be_divided() -> None:
    with pytest.raises(SpecError, match="unit"):
        spec_of({"tensor": 2, "kind": "fsdp", "unit": "layer"})


def test_a_component_without_a_plan_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionSpec, "tensor_plan", lambda self, d_model: None)
    monkeypatch.setattr(AttentionSpec, "divides_sequences", False)
    for name in ("tensor", "context"):
        with pytest.raises(SpecError, match="mixer 'attention'"):
            spec_of({name: 2})


def test_ranks_that_the_divisions_do_not_divide_are_refused() -> None:
    distributed = DistributedSpec(tensor=2, context=2)
    with pytest.raises(ValueError, match="tensor 2 times context 2 does not divide the 6 processes"):
        distributed.resolve(parameters=10, ranks=6, ranks_per_machine=6, memory=None)
    assert distributed.batch_shares(8) == 2
    assert distributed.batch_shares(1) == 1  # one process has whole models and sequences


def test_a_layout_shards_over_the_ranks_with_other_tokens() -> None:
    def resolved(ranks: int, **fields: Any) -> ResolvedLayout:
        return DistributedSpec(**fields).resolve(
            parameters=10**10, ranks=ranks, ranks_per_machine=8, memory=80e9
        )

    assert resolved(8, tensor=2) == ("fsdp", 4, 2, 1)
    assert resolved(8, tensor=2, context=4, kind="fsdp") == ("fsdp", 4, 2, 4)
    assert resolved(16, tensor=2, kind="hsdp") == ("hsdp", 4, 2, 1)
    assert resolved(2, tensor=2) == ("none", 1, 2, 1)
    assert resolved(16, tensor=2, kind="hsdp").name == "hsdp, tensor 2"


def test_every_parameter_of_a_plan_has_the_declared_shape() -> None:
    attention = AttentionSpec(
        n_heads=4, n_kv_heads=2, bias=True, qk_norm="weighted", value_embeddings=7, head_dim=8
    )
    for spec in (attention, Mamba2Spec(head_dim=8, bias=True), HybridSpec(mixers=(attention, attention))):
        plan, shapes = spec.tensor_plan(32), spec.parameter_shapes(32)
        assert plan is not None
        assert shapes is not None
        for name, divided in plan.parameters.items():
            assert sum(section.size for section in divided.sections) == shapes[name][divided.dim], name
        assert sum(section.size for section in plan.injected) == spec.injection_width(32)
