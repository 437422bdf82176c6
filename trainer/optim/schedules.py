"""Learning-rate schedules: the learning rate of a step, given a peak rate. Imports no torch.

A schedule depends on the length of the run only. A phase can change the peak rate
(``phases[i].training.optimizer.learning_rate``) without moving the warm-up or the decay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from implicit_blocks import registry
from trainer.specs.training import steps_of

if TYPE_CHECKING:
    from trainer.specs.training import (
        ConstantSpec,
        CosineSpec,
        LinearSpec,
        RewarmedSpec,
        WarmupConstantSqrtSpec,
        WarmupLinearSpec,
        WSDSpec,
    )


class Schedule(ABC):
    """The learning rate of every step of a run."""

    @abstractmethod
    def rate(self, step: int, *, peak: float) -> float:
        """Return the learning rate of the update at ``step``, counted from 0, for the given peak rate."""


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


class WarmupDecay(Schedule):
    """Linear warm-up, the peak, then a decay of a given shape to a fraction of the peak.

    The rate is ``peak (final + (1 - final) shape(progress))``, where ``progress`` grows from 0 at step
    ``decay_from`` to 1 at the step after the last, as in the schedules of torch and transformers. Only the
    warm-up differs from theirs: it begins at ``peak / warmup_steps``, not at 0.

    Args:
        warmup_steps: steps of the warm-up.
        decay_from: first step of the decay.
        total_steps: steps of the run.
        shape: from 1 at progress 0 to 0 at progress 1.
        final_fraction: the rate at progress 1, as a fraction of the peak.

    """

    def __init__(
        self,
        *,
        warmup_steps: int,
        decay_from: int,
        total_steps: int,
        shape: Callable[[float], float],
        final_fraction: float,
    ) -> None:
        self.warmup_steps = warmup_steps
        self.decay_from = decay_from
        self.total_steps = total_steps
        self.shape = shape
        self.final_fraction = final_fraction

    def rate(self, step: int, *, peak: float) -> float:
        """Return the learning rate of the update at ``step``."""
        if step < self.decay_from:
            return peak * _warm_up(step, self.warmup_steps)
        progress = min(1.0, (step - self.decay_from) / max(1, self.total_steps - self.decay_from))
        return peak * (self.final_fraction + (1.0 - self.final_fraction) * self.shape(progress))


class Rewarmed(Schedule):
    """Another schedule, whose rates a second linear warm-up multiplies."""

    def __init__(self, spec: RewarmedSpec, *, total_steps: int) -> None:
        self.schedule: Schedule = registry.build(spec.schedule, total_steps=total_steps)
        self.begins_at = steps_of(spec.at, total_steps)
        self.warmup_steps = steps_of(spec.warmup, total_steps)

    def rate(self, step: int, *, peak: float) -> float:
        """Return the learning rate of the update at ``step``."""
        rate, since = self.schedule.rate(step, peak=peak), step - self.begins_at
        return rate if since < 0 else rate * _warm_up(since, self.warmup_steps)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _line(progress: float) -> float:
    return 1.0 - progress


def _one_minus_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


def build_cosine(spec: CosineSpec, *, total_steps: int) -> WarmupDecay:
    """Build the cosine schedule (Loshchilov & Hutter, "SGDR", 2017, without restarts)."""
    return _decaying(_half_cosine, spec, total_steps)


def build_linear(spec: LinearSpec, *, total_steps: int) -> WarmupDecay:
    """Build the linear schedule."""
    return _decaying(_line, spec, total_steps)


def _decaying(
    shape: Callable[[float], float], spec: CosineSpec | LinearSpec, total_steps: int
) -> WarmupDecay:
    """Return a schedule that decays from the end of the warm-up to the end of the run."""
    warmup_steps = steps_of(spec.warmup, total_steps)
    return WarmupDecay(
        warmup_steps=warmup_steps,
        decay_from=warmup_steps,
        total_steps=total_steps,
        shape=shape,
        final_fraction=spec.final_fraction,
    )


def build_wsd(spec: WSDSpec, *, total_steps: int) -> WarmupDecay:
    """Build the schedule of a warm-up, a stable rate and a decay.

    See Hu et al., "MiniCPM", 2024; the shape ``1-sqrt`` is of Hägele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations", 2024.
    """
    return WarmupDecay(
        warmup_steps=steps_of(spec.warmup, total_steps),
        decay_from=total_steps - steps_of(spec.decay, total_steps),
        total_steps=total_steps,
        shape=_line if spec.decay_shape == "linear" else _one_minus_sqrt,
        final_fraction=spec.final_fraction,
    )


def build_constant(spec: ConstantSpec, *, total_steps: int) -> WarmupDecay:
    """Build the constant schedule, with a warm-up."""
    return WarmupDecay(
        warmup_steps=steps_of(spec.warmup, total_steps),
        decay_from=total_steps,
        total_steps=total_steps,
        shape=_line,
        final_fraction=1.0,
    )
