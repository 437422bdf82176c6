"""FLOPs of composed models: a counted training step is a measured one."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel
from torch.utils.flop_counter import FlopCounterMode

import implicit_blocks as ib
from implicit_blocks.models.counting import (
    count_flops,
    count_parameters,
    mean_at_most,
    training_flops_per_token,
)
from implicit_blocks.specs import DepthSpec

ATTENTION = {"kind": "attention", "n_heads": 2, "backend": "torch"}
FIXED = {"kind": "fixed", "loops": 5}
LAST = {"kind": "last_loops", "loops": 2}
ALL = {"kind": "last_loops"}


def spec_of(**changes: Any) -> ib.ImplicitLMSpec:
    """Return a sandwich; with sequences of one token attention attends to that token alone."""
    fields: dict[str, Any] = {
        "vocab_size": 11,
        "d_model": 16,
        "n_layers": 2,
        "mixer": ATTENTION,
        "mlp": {"kind": "swiglu", "d_ff": 12},
        "weight_norm": False,
        "prelude": {"n_layers": 1},
        "coda": {"n_layers": 1, "mlp": {"kind": "mlp", "d_ff": 20}},
        "injection": {"kind": "add"},
        "depth": FIXED,
        "gradient": LAST,
    }
    return ib.ImplicitLMSpec(**(fields | changes))


def measured(spec: Any) -> float:
    """Return the FLOPs of a training step per token, counted by torch."""
    model, rows = ib.build(spec).train(), 8
    ids = torch.randint(11, (rows, 1))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    return counter.get_total_flops() / rows


STEPS: dict[str, dict[str, Any]] = {
    "explicit_core": {"depth": {"kind": "fixed", "loops": 1}, "injection": {"kind": "none"}},
    "last_loops": {},
    "fewer_loops_than_differentiated": {"depth": {"kind": "fixed", "loops": 1}},
    "last_loops_of_the_stopping_rule": {
        "depth": {"kind": "until_converged"},
        "stopping": {"max_iterations": 3},
    },
    "all_loops": {"gradient": ALL},
    "phantom": {"gradient": {"kind": "phantom", "steps": 3}},
    "one_step_adjoint": {"gradient": {"kind": "one_step_adjoint"}},
    "unrolled": {"depth": {"kind": "until_converged"}, "gradient": {"kind": "unrolled", "steps": 3}},
    "projection": {"injection": {"kind": "projection"}},
    "concat": {"injection": {"kind": "concat"}},
    "diagonal_in_a_wider_core": {
        "injection": {"kind": "diagonal"},
        "core_d_model": 24,
        "core_projection": True,
    },
    "attractor": {"injection": {"kind": "attractor"}},
    "residual": {"injection": {"kind": "residual", "gate_init": 0.5}},
    "iterates_and_last": {"gradient": ALL, "objective": {"kind": "iterates", "at": [2, "last"]}},
    "iterates_without_last": {"gradient": ALL, "objective": {"kind": "iterates", "at": [2, 3]}},
    "exit_expectation": {"gradient": ALL, "objective": {"kind": "exit_expectation"}, "exit_gate": True},
    "exit_mixture": {"gradient": ALL, "objective": {"kind": "exit_mixture"}, "exit_gate": True},
    "pattern": {
        "prelude": None,
        "coda": {"n_layers": 3},
        "n_layers": 3,
        "layers": [{"mlp": {"kind": "mlp", "d_ff": 8}, "repeat": 2}, {"mlp": {"kind": "swiglu", "d_ff": 24}}],
    },
}


@pytest.mark.parametrize("changes", STEPS.values(), ids=STEPS.keys())
def test_counted_operations_of_a_step_are_those_that_torch_executes(changes: dict[str, Any]) -> None:
    spec = spec_of(**changes)
    # The remainder are norms of gradients, mixtures of predictions, and products that torch does not count.
    assert training_flops_per_token(spec, length=1) == pytest.approx(measured(spec), rel=0.01)


def test_the_explicit_twin_runs_every_layer_once() -> None:
    spec = ib.ExplicitLMSpec(
        **{
            name: value
            for name, value in spec_of().model_dump().items()
            if name in ib.ExplicitLMSpec.model_fields and name != "kind"
        }
    )
    assert training_flops_per_token(spec, length=1) == pytest.approx(measured(spec))


def test_prelude_and_coda_cost_nothing_per_loop() -> None:
    few, many = (
        training_flops_per_token(spec_of(depth={"kind": "fixed", "loops": loops}), length=1)
        for loops in (4, 9)
    )
    once = count_flops(spec_of(), length=1)
    assert once is not None
    assert few is not None
    assert many is not None
    assert once.layers is not None
    assert many - few == pytest.approx(5 * once.layers)  # loops without gradients: forward passes


@pytest.mark.parametrize(
    "depth",
    [
        {"kind": "poisson", "mean": 4, "minimum": 2},
        {"kind": "poisson", "mean": 4, "maximum": 5},
        {"kind": "log_normal_poisson", "mean": 4, "maximum": 12},
        {"kind": "uniform", "low": 2, "high": 7},
    ],
    ids=lambda depth: depth["kind"],
)
@pytest.mark.parametrize("loops", [1, 3, 6])
def test_random_depths_cost_the_mean_over_their_numbers(depth: dict[str, Any], loops: int) -> None:
    spec = spec_of(depth=depth, gradient={"kind": "last_loops", "loops": loops})
    sampler = ib.build(spec.depth).train()
    drawn = [sampler.sample(1, "cpu") for _ in range(3000)]
    each = [training_flops_per_token(spec, length=1, iterations=number) for number in set(drawn)]
    cost = dict(zip(set(drawn), each, strict=True))
    mean = statistics.mean(cost[number] for number in drawn)  # type: ignore[type-var]  # none of them is None
    assert training_flops_per_token(spec, length=1) == pytest.approx(mean, rel=0.02)


def test_a_depth_of_a_plugin_is_bounded_by_its_mean() -> None:
    assert mean_at_most(DepthSpec.model_construct(), 3, otherwise=2.5) == 2.5
    assert mean_at_most(DepthSpec.model_construct(), 3, otherwise=8.0) == 3


def test_costs_are_unknown_where_a_prelude_does_not_provide_them() -> None:
    class SilentSpec(ib.MLPSpec):
        kind: Literal["silent"] = "silent"

    spec = spec_of()
    assert spec.prelude is not None
    silent = BaseModel.model_copy(spec.prelude, update={"mlp": SilentSpec()})  # not registered
    spec = BaseModel.model_copy(spec, update={"prelude": silent})
    counts, flops = count_parameters(spec), count_flops(spec, length=1)
    assert counts is not None
    assert flops is not None
    assert (counts.prelude, counts.total, flops.prelude) == (None, None, None)
    assert counts.backbone is not None
    assert flops.layers is not None
    assert training_flops_per_token(spec, length=1) is None


@pytest.mark.parametrize(
    "changes", [{"n_layers": 10**12}, {"coda": {"n_layers": 10**12}}], ids=["core", "coda"]
)
def test_more_layers_than_can_be_listed_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="n_layers is 1000000000000; choose at most 65536"):
        spec_of(**changes)
