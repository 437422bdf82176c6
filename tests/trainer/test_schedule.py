from __future__ import annotations

from itertools import pairwise

import pytest

from trainer.schedule import WarmupConstantSqrt, WarmupLinear, steps_of


def test_a_float_is_a_share_of_the_run_and_an_integer_steps() -> None:
    assert steps_of(0.25, 200) == 50
    assert steps_of(1.0, 200) == 200
    assert steps_of(1, 200) == 1
    assert steps_of(0, 200) == 0


def test_warm_up_constant_sqrt_has_its_three_parts() -> None:
    schedule = WarmupConstantSqrt(total_steps=100, warmup_steps=10, decay_steps=20, final_rate=1e-5)
    rates = [schedule.rate(step, peak=1e-3) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4)  # not 0: no update is wasted
    assert rates[9] == pytest.approx(1e-3)
    assert rates[10:80] == [1e-3] * 70
    halfway = 1e-5 + (1e-3 - 1e-5) * (1 - 0.5**0.5)
    assert rates[89] == pytest.approx(halfway)
    assert rates[99] == pytest.approx(1e-5)
    assert all(later <= earlier for earlier, later in pairwise(rates[80:]))


def test_warm_up_linear_falls_in_a_straight_line() -> None:
    schedule = WarmupLinear(total_steps=100, warmup_steps=10, final_rate=0.0)
    rates = [schedule.rate(step, peak=1.0) for step in range(100)]
    assert rates[9] == 1.0
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)


def test_a_phase_may_change_the_peak_without_moving_the_decay() -> None:
    schedule = WarmupConstantSqrt(total_steps=10, warmup_steps=0, decay_steps=2, final_rate=0.0)
    assert schedule.rate(5, peak=2.0) == 2 * schedule.rate(5, peak=1.0)
    assert schedule.rate(9, peak=2.0) == schedule.rate(9, peak=1.0) == 0.0


def test_parts_that_just_fit_leave_no_constant_rate() -> None:
    schedule = WarmupConstantSqrt(total_steps=10, warmup_steps=8, decay_steps=2, final_rate=0.0)
    rates = [schedule.rate(step, peak=1.0) for step in range(10)]
    assert rates == [pytest.approx((step + 1) / 8) for step in range(8)] + [pytest.approx(1 - 0.5**0.5), 0.0]
    assert WarmupLinear(total_steps=10, warmup_steps=10, final_rate=0.0).rate(9, peak=1.0) == 1.0


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="warm-up of 8 steps and a decay of 5 do not fit into 10 steps"):
        WarmupConstantSqrt(total_steps=10, warmup_steps=8, decay_steps=5, final_rate=0.0)
    with pytest.raises(ValueError, match="warm-up of 11 steps does not fit into 10 steps"):
        WarmupLinear(total_steps=10, warmup_steps=11, final_rate=0.0)
