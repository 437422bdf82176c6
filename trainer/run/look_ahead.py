"""Steps that are launched ahead of their results, for runs that train side by side in one process.

A run of :class:`trainer.run.loop.Loop` reads the measurements of a step before it launches the next one. Here
the steps up to the next event (evaluation, checkpoint, end of a phase) are captured as one CUDA graph each
and launched some at a time; while the device computes them, the other runs of the process are continued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from trainer.data.source import IGNORED
from trainer.errors import DataError
from trainer.reporting.display import Display
from trainer.run.captured_step import CapturedStep, why_phase_not_captured
from trainer.run.interrupt import Interrupt
from trainer.run.step import MadeStep, compacts, not_scored, step_result
from trainer.run.trainable_model import AgreesOnStopping, CapturesGraphs

if TYPE_CHECKING:
    from trainer.run.loop import EagerSteps

AT_ONCE = 32
"""Largest number of steps that are launched together."""
QUEUED = 2
"""Launches that a stream may have waiting, so that it is busy while the host processes results."""


class Turns(Protocol):
    """The turns of a run that shares its process with others."""

    @property
    def interrupt(self) -> Interrupt:
        """The signals that the process receives."""

    def pause(self, *, until: Callable[[], bool] | None = None) -> None:
        """Let the other runs continue; with ``until``, at least until it returns True."""


@dataclass(eq=False)
class _Launch:
    """Steps that were launched together."""

    values: AsyncHostCopy
    count: int
    rows: deque[list[float]] | None = None
    """The measurements of the steps that are still to be returned; None: they have not been read."""
    seconds: float | None = None
    """Duration of each step; None: not known yet."""


class LookAhead:
    """Makes the steps of a run that shares its process; in phases where they can be captured, ahead.

    Args:
        eager: makes the steps of all other phases.
        display: shows why steps are not captured.
        turns: of the run among those of its process.

    """

    def __init__(self, eager: EagerSteps, *, display: Display, turns: Turns) -> None:
        self._eager, self._display, self._turns = eager, display, turns
        self._device, self._model = eager.layout.ranks.device, eager.layout.model
        # Callbacks see the weights after each step, and may end the run there.
        self._at_once, self._queued = (1, 1) if eager.spec.callbacks else (AT_ONCE, QUEUED)
        self._reason: str | None = ""
        """Why the steps of the phase are not captured; None: they are."""
        self._captured: CapturedStep | None = None
        self._waiting: deque[_Launch] = deque()
        self._launched = 0
        """Number of steps of the run that are made or launched."""
        self._read_at = 0.0
        """When the latest results arrived."""

    @property
    def in_flight(self) -> int:
        """Number of steps that are launched and have not been returned."""
        return sum(each.count if each.rows is None else len(each.rows) for each in self._waiting)

    def enter_phase(self) -> None:
        """Prepare the steps of the active phase."""
        assert not self._waiting, "steps of one phase are launched together"
        if self._captured is not None:
            self._captured.release()
            self._captured = None
        spec, model, before = self._eager.spec, self._model, self._reason
        self._reason = why_phase_not_captured(spec, self._eager.active.phase, self._device)
        changed = (self._reason is None) != (before is None)
        if changed and spec.training.cuda_graphs and isinstance(model, CapturesGraphs):
            model.capture_graphs(self._reason is not None)  # of the map; the graph of a step contains it
        if self._reason is not None and self._reason != before:
            self._display.log(f"steps run eagerly, not as a captured CUDA graph: {self._reason}")

    def make(self, step: int, first: int, *, until: int) -> MadeStep:
        """Make ``step``, whose batch begins at sample ``first``; launch later ones before ``until`` too.

        While steps are `in_flight`, the weights may be those of later steps, but not of steps after the next
        evaluation, checkpoint or export.

        Raises:
            DataError: the data of the step cannot be used.

        """
        if self._reason is not None:
            self._turns.pause()
            return self._eager.make(step, first, until=until)
        phase = self._eager.active.phase
        if not self._waiting:
            self._launched, self._read_at = step, perf_counter()
        until = max(step + 1, min(until, phase.last_step, *self._events_after(step)))
        while len(self._waiting) < self._queued and self._launched < until:
            position = first + (self._launched - step) * phase.training.batch_size
            if not self._launch(position, min(self._at_once, until - self._launched)):
                break
        launch = self._waiting[0]
        if launch.rows is None:
            self._turns.pause(until=lambda: launch.values.arrived)
            launch.rows = deque(launch.values.read())
            if launch.seconds is None:
                self._time_arrived()
        values = launch.rows.popleft()
        if not launch.rows:
            self._waiting.popleft()
        result = step_result(
            [values],
            first_adjoint=self._step().first_adjoint,
            at_once=phase.training.batch_size,
            compacts=compacts(self._model),
        )
        if self._eager.average is not None and result.not_finite is None:
            self._eager.average.count(step + 1)
        rate = self._eager.schedule.rate(step, peak=phase.training.optimizer.learning_rate)
        assert launch.seconds is not None
        return MadeStep(result, rate, phase.training.batch_size * phase.data.seq_len, launch.seconds)

    def _time_arrived(self) -> None:
        """Divide the time since the last results among the launches that have arrived since then.

        Several may arrive during the turns of other runs.
        """
        arrived, now = [each for each in self._waiting if each.values.arrived], perf_counter()
        for each in arrived:
            each.seconds = (now - self._read_at) / sum(one.count for one in arrived)
        self._read_at = now

    def _events_after(self, step: int) -> list[int]:
        """Return the next steps after ``step`` whose weights are evaluated, saved and exported."""
        training = self._eager.active.phase.training
        every = (training.evaluate_every, training.checkpoint_every, training.export_every)
        return [(step // each + 1) * each for each in every if each is not None]

    def _step(self) -> CapturedStep:
        """Return what makes the steps of the active phase."""
        if self._captured is None:
            eager, phase = self._eager, self._eager.active.phase
            eager.layout.forward.train()
            peak = phase.training.optimizer.learning_rate
            self._captured = CapturedStep(
                self._model,
                eager.optimizer,
                rates=[eager.schedule.rate(number, peak=peak) for number in range(phase.last_step)],
                batch_size=phase.training.batch_size,
                length=phase.data.seq_len,
                precision=phase.training.precision,
                max_grad_norm=phase.training.max_grad_norm,
                device=self._device,
                at_once=self._at_once,
                first=self._launched,
                last_tokens=eager.spec.evaluation.last_tokens,
                average=eager.average,
                own_stream=False,
            )
        return self._captured

    def _launch(self, position: int, count: int) -> bool:
        """Launch the next steps; return whether their data can be used.

        Raises:
            DataError: the data of the next step cannot be used, and no earlier step is in flight.

        """
        active = self._eager.active
        size = active.phase.training.batch_size
        try:
            batch = active.batch(self._launched, position, steps=count)
            for number in range(count):
                own, at = batch.rows(number * size, (number + 1) * size), position + number * size
                if not bool((own.labels != IGNORED).any()):
                    place = f"step {self._launched + number + 1} (samples {at} to {at + size - 1})"
                    raise not_scored(own, place)
        except DataError:
            if not self._waiting and count == 1:
                raise
            return not self._waiting and self._launch(position, 1)  # the steps before come first
        captured = self._step()
        captured.load(batch)
        captured.run(count)
        if isinstance(self._model, AgreesOnStopping):
            self._model.agree = None  # evaluations end their searches early
        self._waiting.append(_Launch(AsyncHostCopy(captured.measurements(count)), count))
        self._launched += count
        return True
