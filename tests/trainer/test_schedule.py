from __future__ import annotations

from itertools import pairwise

import pytest

from trainer.optim.schedules import WarmupConstantSqrt, WarmupLinear, steps_of
from trainer.specs.run import WarmupConstantSqrtSpec, WarmupLinearSpec


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
