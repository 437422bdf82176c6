"""Several small models trained side by side in one process, each on its own stream of the device.

The runs wait in a queue; a run that ends makes room for the next one. Batches, initial weights, learning
rates and updates are those of ``python -m trainer`` for the same spec (`trainer.run.captured_step`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from implicit_blocks import registry
from trainer.data.source import take
from trainer.run.captured_step import CapturedStep, refuse_unsupported, why_not_captured
from trainer.run.parts import Parts, make_parts
from trainer.run.trainable_model import Reconfigures
from trainer.specs.run import Phase, RunSpec

_LOG = logging.getLogger(__name__)

QUEUED = 2
"""Loads of batches that a model's stream may have waiting: enough to keep it busy during an evaluation."""
KNOWN_AFTER, WINDOW, TOLD_AFTER = 60.0, 30.0, 60.0
"""Seconds before the rate of the device is planned with, over which it is measured, and between reports."""
ALONE = 0.45
"""Rate of a model that trains alone, as a share of that of several: a cautious estimate."""


@dataclass(frozen=True)
class Planned:
    """A run in the queue."""

    name: str
    spec: RunSpec
    flops: float
    """Floating-point operations of the whole run."""
    averages: tuple[float, ...] = ()
    """Factors of moving averages of the weights, per step."""


@dataclass(eq=False)
class Trained:
    """A run that is training or has ended, with its model on the device."""

    planned: Planned
    parts: Parts
    step: CapturedStep
    began: float
    eager: str | None = None
    """Why its steps are not to be captured; None: they are, where that is possible."""
    ended: str | None = None
    """Why the run ended before its last step; None: it did not."""
    seconds: float = 0.0
    samples: int = 0
    meanwhile: Callable[[], object] = lambda: None
    """Launches steps of the other runs; for calls while this one is evaluated, so that they do not wait."""
    _waiting: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    _phases: list[Phase] = field(init=False)
    _phase: int = 0
    _not_finite: int = 0

    def __post_init__(self) -> None:
        self._phases = self.planned.spec.phase_specs()
        self.total = self._phases[-1].last_step
        """Number of steps of the run."""

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.step.model

    @property
    def finished(self) -> bool:
        """Whether all steps are launched, or the run ended early."""
        return self.ended is not None or self.step.done >= self.total

    @property
    def progress(self) -> str:
        """The name of the run, and the steps that are launched."""
        return f"{self.planned.name}: {self.step.done} of {self.total} steps"

    def ready(self) -> bool:
        """Whether the stream has room for another load of batches; reads losses that have arrived."""
        while self._waiting and (self._waiting[0][0] is None or self._waiting[0][0].query()):
            _, loss = self._waiting.popleft()
            self._not_finite = 0 if math.isfinite(float(loss)) else self._not_finite + 1
            if self._not_finite > 1 and self.ended is None:
                self.ended = f"the loss is not finite by step {self.step.done}"
        return len(self._waiting) < QUEUED

    def advance(self) -> None:
        """Launch the next steps, as many as are loaded at once."""
        phases, step = self._phases, self.step
        while step.done >= phases[self._phase].last_step:
            self._phase += 1
            model = phases[self._phase].model
            if model != phases[self._phase - 1].model:
                assert isinstance(self.model, Reconfigures)
                step.synchronize()
                self.model.reconfigure(model)
                step.recapture(self.eager or why_not_captured(self.planned.spec, model, step.device))
        phase = phases[self._phase]
        count = min(step.at_once, phase.last_step - step.done)
        size = phase.training.batch_size
        step.load(take(self.parts.sources[0], self.samples, count * size))
        step.run(count)
        self.samples += count * size
        loss, event = step.last_loss(), None
        if step.stream is not None:
            event = torch.cuda.Event()
            event.record(step.stream)
        self._waiting.append((event, loss))


def begin(planned: Planned, device: torch.device, *, at_once: int = 32, eager: str | None = None) -> Trained:
    """Build a run's data, model and optimizer; initial weights and data are those of `trainer.run.build`.

    ``eager`` says why its steps are not captured; None: they are, where that is possible.

    Raises:
        ValueError: a component cannot be built, or the run is not supported here.

    """
    spec = planned.spec
    refuse_unsupported(spec)
    parts = make_parts(spec, origin=None, processes=1)
    phases = spec.phase_specs()
    model = parts.model.to(device).train()
    if phases[0].model != spec.model and isinstance(model, Reconfigures):
        model.reconfigure(phases[0].model)
    optimizer = registry.build(spec.training.optimizer, model=model)
    schedule = registry.build(spec.schedule_spec(), total_steps=spec.total_steps)
    peak = spec.training.optimizer.learning_rate
    reason = eager or why_not_captured(spec, phases[0].model, device)
    if reason is not None and device.type == "cuda":
        _LOG.warning("%s runs eagerly: %s", planned.name, reason)
    step = CapturedStep(
        model,
        optimizer,
        rates=[schedule.rate(number, peak=peak) for number in range(phases[-1].last_step)],
        batch_size=spec.training.batch_size,
        length=spec.data.seq_len,
        precision=spec.training.precision,
        max_grad_norm=spec.training.max_grad_norm,
        device=device,
        at_once=at_once,
        averages=planned.averages,
        not_captured=reason,
    )
    return Trained(planned, parts, step, began=time.monotonic(), eager=eager)


def train_side_by_side(
    queue: Iterable[Planned],
    *,
    device: torch.device,
    on_end: Callable[[Trained], object],
    side_by_side: int = 6,
    at_once: int = 64,
    seconds: float = math.inf,
    spare: float = 0.0,
    eager: str | None = None,
    log: Callable[[str], object] = lambda text: None,
) -> list[str]:
    """Train the runs of a queue in its order, some side by side; return the names of those not finished.

    A run that would not end in time at the measured rate is not started; a shorter one after it may start.
    Where the time becomes too short for all that are training, the last of them wait. When the time is over,
    runs whose last step is launched still end, and all others are given up.

    Args:
        queue: the runs, the most important first.
        device: of all models.
        on_end: called with each run after its last step, as for an evaluation; the others continue meanwhile.
        side_by_side: the largest number of runs that train at a time.
        at_once: steps whose batches are loaded together.
        seconds: after which no step is launched any more.
        spare: seconds of them that an ended run's `on_end` takes, for the decision whether to begin a run.
        eager: why no step is captured; None: steps are captured where that is possible.
        log: called with a line of progress.

    """
    waiting, missing = deque(queue), list[str]()
    active, ended = list[Trained](), list[Trained]()
    clock, told = _Clock(seconds), 0.0
    while ended or any(one.finished for one in active) or (clock.left > 0 and (waiting or active)):
        pending, ended = ended, []  # evaluated after the start of those that follow, which train meanwhile
        clock.record(sum(_work(one) for one in active))
        rate = clock.rate
        if active and clock.now - told > TOLD_AFTER and rate < math.inf:
            told = clock.now
            log("; ".join([*(one.progress for one in active), f"{rate / 1e12:.3g} TFLOP/s together"]))
        while waiting and len(active) < side_by_side:
            planned = waiting.popleft()
            ahead = sum(one.planned.flops - _work(one) for one in active)
            needed = max((ahead + planned.flops) / rate, planned.flops / (ALONE * rate)) + spare
            if needed > clock.left:
                log(f"{planned.name}: not started: needs {needed:.0f} s, {clock.left:.0f} s remain")
                missing.append(planned.name)
                continue
            active.append(begin(planned, device, at_once=at_once, eager=eager))
            log(f"{planned.name}: started after {clock.now:.0f} s, {active[-1].total} steps")
        moved, ahead = False, 0.0
        for number, one in enumerate(list(active)):
            ahead += one.planned.flops - _work(one)
            # Where the time is too short for all, the first ones are to end.
            affordable = clock.left > 0 and (number == 0 or ahead / rate < clock.left)
            if one.ready() and not one.finished and affordable:
                one.advance()
                moved = True
            if one.finished and not one._waiting:
                active.remove(one)
                clock.ended += _work(one)
                one.seconds = time.monotonic() - one.began
                ended.append(one)
                moved = True
        for one in pending:
            one.meanwhile = partial(_advance_ready, tuple(active), clock)
            on_end(one)
        if not moved and not pending:
            time.sleep(0.0005)
    for one in active:
        one.step.synchronize()
        log(f"{one.progress}: the time limit is reached")
    return [*missing, *(one.planned.name for one in active), *(one.name for one in waiting)]


@torch.enable_grad()
def _advance_ready(runs: Sequence[Trained], clock: _Clock) -> None:
    """Launch steps of the runs whose streams have room; gradients are recorded also within ``no_grad``."""
    for one in runs:
        if one.ready() and not one.finished and clock.left > 0:
            one.advance()


class _Clock:
    """The time left, and the FLOPs per second of the last seconds, all models together."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds
        self._samples: deque[tuple[float, float]] = deque()
        self.ended = 0.0
        """FLOPs of the runs that have ended."""

    @property
    def now(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self._seconds - self.now

    @property
    def rate(self) -> float:
        """Infinite until it is known."""
        if self.now < KNOWN_AFTER or len(self._samples) < 2:
            return math.inf
        (first, before), (last, work) = self._samples[0], self._samples[-1]
        return (work - before) / (last - first) if work > before else math.inf

    def record(self, work_of_active: float) -> None:
        now = self.now
        if not self._samples or now - self._samples[-1][0] > 1:
            self._samples.append((now, self.ended + work_of_active))
            # The first sample is as old as the window or older, however long an evaluation took.
            while len(self._samples) > 1 and now - self._samples[1][0] > WINDOW:
                self._samples.popleft()


def _work(one: Trained) -> float:
    """Return the FLOPs of a run so far."""
    return one.planned.flops * one.step.done / one.total
