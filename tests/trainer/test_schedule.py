from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from implicit_blocks import registry
from implicit_blocks.specs import SpecError
from trainer.optim.schedules import WarmupConstantSqrt, WarmupLinear
from trainer.specs.run import (
    ConstantSpec,
    CosineSpec,
    LinearSpec,
    RewarmedSpec,
    RunSpec,
    ScheduleSpec,
    WarmupConstantSqrtSpec,
    WarmupLinearSpec,
    WSDSpec,
)
from trainer.specs.training import steps_of


def constant_sqrt(*, warmup: int, decay: int, final: float, total_steps: int) -> WarmupConstantSqrt:
    spec = WarmupConstantSqrtSpec(warmup=warmup, decay=decay, final_learning_rate=final)
    return WarmupConstantSqrt(spec, total_steps=total_steps)


def test_a_float_is_a_share_of_the_run_and_an_integer_steps() -> None:
    assert steps_of(0.25, 200) == 50
    assert steps_of(1.0, 200) == 200
    assert steps_of(1, 200) == 1
    assert steps_of(0, 200) == 0


def test_warm_up_constant_sqrt_has_its_three_parts() -> None:
    schedule = constant_sqrt(warmup=10, decay=20, final=1e-5, total_steps=100)
    rates = [schedule.rate(step, peak=1e-3) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4)  # not 0: no update is wasted
    assert rates[9] == pytest.approx(1e-3)
    assert rates[10:80] == [1e-3] * 70
    halfway = 1e-5 + (1e-3 - 1e-5) * (1 - 0.5**0.5)
    assert rates[89] == pytest.approx(halfway)
    assert rates[99] == pytest.approx(1e-5)
    assert all(later <= earlier for earlier, later in pairwise(rates[80:]))


def test_warm_up_linear_decays_linearly() -> None:
    schedule = WarmupLinear(WarmupLinearSpec(warmup=10), total_steps=100)
    rates = [schedule.rate(step, peak=1.0) for step in range(100)]
    assert rates[9] == 1.0
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)


def test_a_phase_may_change_the_peak_without_moving_the_decay() -> None:
    schedule = constant_sqrt(warmup=0, decay=2, final=0.0, total_steps=10)
    assert schedule.rate(5, peak=2.0) == 2 * schedule.rate(5, peak=1.0)
    assert schedule.rate(9, peak=2.0) == schedule.rate(9, peak=1.0) == 0.0


def test_warm_up_and_decay_may_fill_the_run() -> None:
    schedule = constant_sqrt(warmup=8, decay=2, final=0.0, total_steps=10)
    rates = [schedule.rate(step, peak=1.0) for step in range(10)]
    assert rates == [pytest.approx((step + 1) / 8) for step in range(8)] + [pytest.approx(1 - 0.5**0.5), 0.0]
    assert WarmupLinear(WarmupLinearSpec(warmup=10), total_steps=10).rate(9, peak=1.0) == 1.0


def rates_of(spec: ScheduleSpec, total_steps: int, peak: float = 1.0) -> list[float]:
    schedule = registry.build(spec, total_steps=total_steps)
    return [schedule.rate(step, peak=peak) for step in range(total_steps)]


@pytest.mark.parametrize("warmup", [0, 5, 0.3], ids=["none", "steps", "share"])
@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd_linear", "wsd_1-sqrt"])
def test_schedules_equal_those_of_transformers_after_the_warm_up(kind: str, warmup: float) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    steps, final = steps_of(warmup, 40), 0.0 if kind == "linear" else 0.25
    name, _, shape = kind.partition("_")
    spec: ScheduleSpec
    if name == "cosine":
        spec = CosineSpec(warmup=warmup, final_fraction=final)
        theirs = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, steps, 40, min_lr_rate=final
        )
    elif name == "linear":
        spec = LinearSpec(warmup=warmup)
        theirs = optimization.get_linear_schedule_with_warmup(optimizer, steps, 40)
    else:
        spec = WSDSpec(warmup=warmup, decay=0.25, decay_shape=shape, final_fraction=final)
        theirs = optimization.get_wsd_schedule(
            optimizer, steps, 10, num_training_steps=40, decay_type=shape, min_lr_ratio=final
        )
    expected = [theirs.lr_lambdas[0](step) for step in range(40)]
    found = rates_of(spec, 40)
    assert found[steps:] == pytest.approx(expected[steps:], abs=1e-12)
    assert found[:steps] == pytest.approx([(step + 1) / steps for step in range(steps)])


def test_a_constant_schedule_keeps_the_peak_after_its_warm_up() -> None:
    assert rates_of(ConstantSpec(), 4, peak=0.5) == [0.5] * 4
    assert rates_of(ConstantSpec(warmup=2), 4, peak=0.5) == [0.25, 0.5, 0.5, 0.5]


def test_a_second_warm_up_multiplies_the_rates_of_another_schedule() -> None:
    inner = WSDSpec(warmup=2, decay=4)
    plain, found = (rates_of(spec, 10) for spec in (inner, RewarmedSpec(at=0.3, warmup=4, schedule=inner)))
    factors = [1.0] * 3 + [0.25, 0.5, 0.75] + [1.0] * 4
    assert found == pytest.approx([rate * factor for rate, factor in zip(plain, factors, strict=True)])


def test_spans_of_a_second_warm_up_may_be_tokens(small: Callable[..., RunSpec]) -> None:
    inner = {"kind": "constant", "warmup": "1 tokens"}
    changes = {"kind": "rewarmed", "at": "1 tokens", "warmup": "1 tokens", "schedule": inner}
    found = small({"training.schedule": changes}).schedule_spec()
    assert isinstance(found, RewarmedSpec)
    assert isinstance(found.schedule, ConstantSpec)
    assert (found.at, found.warmup, found.schedule.warmup) == (1, 1, 1)


def test_a_final_fraction_scales_with_the_peak_of_a_phase() -> None:
    spec = WSDSpec(warmup=0, decay=2, final_fraction=0.1)
    assert rates_of(spec, 6, peak=2.0) == [2.0 * rate for rate in rates_of(spec, 6)]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"kind": "cosine", "warmup": 5}, "a warmup of 5 steps doesn't fit into 4 steps"),
        ({"kind": "linear", "warmup": "1000 tokens"}, "doesn't fit into 4 steps"),
        ({"kind": "wsd", "warmup": 2, "decay": 3}, "a decay of 3 don't fit into 4 steps"),
        ({"kind": "constant", "warmup": 5}, "shorten it, or use shares"),
        (
            {"kind": "rewarmed", "at": 2, "warmup": 3},
            "second warmup of 3 steps after step 2 doesn't fit into 4",
        ),
        (
            {"kind": "rewarmed", "at": 0, "warmup": 1, "schedule": {"kind": "cosine", "warmup": 5}},
            "a warmup of 5",
        ),
        ({"kind": "cosine", "final_fraction": 1.5}, "final_fraction"),
        ({"kind": "cosin"}, "did you mean 'cosine'"),
    ],
    ids=["cosine", "tokens", "wsd", "constant", "second", "inner", "fraction", "kind"],
)
def test_a_schedule_that_does_not_fit_is_refused_with_its_place(
    small: Callable[..., RunSpec], schedule: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        small({"training.schedule": schedule})
    assert "training.schedule" in str(caught.value)
