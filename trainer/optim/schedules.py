"""Learning-rate schedules: a peak rate and a step give the rate of that step.

A schedule knows the length of the run and nothing else, so that a phase may change the peak
(``phases[i].training.optimizer.learning_rate``) without moving the warm-up or the decay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.specs.training import WarmupConstantSqrtSpec, WarmupLinearSpec


class Schedule(ABC):
    """The learning rate of every step of a run."""

    @abstractmethod
    def rate(self, step: int, *, peak: float) -> float:
        """Return the learning rate of the update at ``step`` (counted from 0), for a given peak rate."""


def steps_of(amount: float | int | str, total_steps: int) -> int:
    """Return ``amount`` in steps: a float below 1 is a fraction of the run, anything else is steps already.

    A fraction is rounded to the nearest step; the fraction 1.0 is the whole run. What counts tokens must have
    been worked out (`ScheduleSpec.in_steps`).
    """
    assert not isinstance(amount, str)
    if isinstance(amount, float) and amount <= 1.0:
        return round(amount * total_steps)
    return int(amount)


def _warm_up(step: int, warmup_steps: int) -> float:
    # (step + 1): the first update would otherwise have rate 0 and be wasted.
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


class WarmupConstantSqrt(Schedule):
    """Linear warm-up, a constant peak, then ``1 - sqrt`` decay down to a final rate.

    Over the last ``decay_steps`` the rate is ``final + (peak - final) (1 - sqrt(progress))`` (Hägele et al.,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024).
    """

    def __init__(self, spec: WarmupConstantSqrtSpec, *, total_steps: int) -> None:
        self.total_steps = total_steps
        self.warmup_steps = steps_of(spec.warmup, total_steps)
        self.decay_steps = steps_of(spec.decay, total_steps)
        self.final_rate = spec.final_learning_rate

    def rate(self, step: int, *, peak: float) -> float:
        """Return the learning rate of the update at ``step``."""
        decay_from = self.total_steps - self.decay_steps
        if step < decay_from or self.decay_steps == 0:
            return peak * _warm_up(step, self.warmup_steps)
        # The last step of the run gets the final rate exactly.
        progress = min(1.0, (step - decay_from + 1) / self.decay_steps)
        return self.final_rate + (peak - self.final_rate) * (1.0 - math.sqrt(progress))


class WarmupLinear(Schedule):
    """Linear warm-up, then a straight line down to a final rate, which the step after the last would have."""

    def __init__(self, spec: WarmupLinearSpec, *, total_steps: int) -> None:
        self.total_steps = total_steps
        self.warmup_steps = steps_of(spec.warmup, total_steps)
        self.final_rate = spec.final_learning_rate

    def rate(self, step: int, *, peak: float) -> float:
        """Return the learning rate of the update at ``step``."""
        if step < self.warmup_steps:
            return peak * _warm_up(step, self.warmup_steps)
        falling = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, falling))
        return peak + (self.final_rate - peak) * progress
