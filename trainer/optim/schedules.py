"""Learning-rate schedules: the learning rate of a step, given a peak rate. Imports no torch.

A schedule depends on the length of the run only. A phase can change the peak rate
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
        """Return the learning rate of the update at ``step``, counted from 0, for the given peak rate."""


def steps_of(amount: float | int | str, total_steps: int) -> int:
    """Return ``amount`` in steps: a float up to 1.0 is a fraction of the run, any other number is in steps.

    A fraction is rounded to the nearest step. Amounts in tokens must be converted first
    (`ScheduleSpec.in_steps`).
    """
    assert not isinstance(amount, str)
    if isinstance(amount, float) and amount <= 1.0:
        return round(amount * total_steps)
    return int(amount)


def _warm_up(step: int, warmup_steps: int) -> float:
    # step + 1, because the first update would otherwise have rate 0.
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


class WarmupConstantSqrt(Schedule):
    """Linear warm-up, constant peak, then ``1 - sqrt`` decay to a final rate.

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
        # The last step of the run has exactly the final rate.
        progress = min(1.0, (step - decay_from + 1) / self.decay_steps)
        return self.final_rate + (peak - self.final_rate) * (1.0 - math.sqrt(progress))


class WarmupLinear(Schedule):
    """Linear warm-up, then linear decay; the step after the last one would have the final rate."""

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
