"""A queue of runs of which several train side by side in this process, each in turn and on its own stream.

Each run is a call of ``python -m trainer`` in a thread of its own, of which one at a time is active: it
pauses after some steps, or while it waits for the device. A run that fails takes no other with it, unless it
leaves the device unusable.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from trainer.cli.exit_codes import INTERRUPTED, LOST
from trainer.cli.train import main, prepare_environment
from trainer.run.interrupt import SIGNALS, Interrupt, hang_ups
from trainer.sweep.queue import Job, QueueStopped

if TYPE_CHECKING:
    import torch

TURN = 0.02
"""Seconds after which a run pauses that does not wait for the device."""
POLL = 0.0002
"""Seconds between two looks at the device while all runs wait for it."""


def run_side_by_side(
    jobs: Sequence[Job],
    *,
    side_by_side: int,
    device: str = "auto",
    ended: Callable[[Job, int, float], object] = lambda job, code, seconds: None,
) -> None:
    """Run the jobs in order, up to ``side_by_side`` at a time; a run that ends makes room for the next one.

    A signal that ends programs (Ctrl-C, SIGTERM) saves and ends all runs.

    Args:
        jobs: the runs, all on ``device``.
        side_by_side: maximum number at a time.
        device: as on the command line.
        ended: called with the exit code and the seconds of each run that ends.

    Raises:
        QueueStopped: by a signal.
        ValueError: the device is not available.

    """
    prepare_environment()
    import torch

    from implicit_blocks._utils.devices import choose_device

    chosen, threads = choose_device(device), torch.get_num_threads()
    waiting, active = deque(jobs), list[_Run]()
    try:
        with Interrupt((*SIGNALS, *hang_ups())) as interrupt:
            while active or (waiting and interrupt.received is None):
                while waiting and len(active) < side_by_side and interrupt.received is None:
                    active.append(_Run(waiting.popleft(), interrupt, device=chosen, threads=threads))
                ready = [run for run in active if run.is_ready]
                for run in ready:
                    run.advance()
                    if run.code is not None:
                        active.remove(run)
                        ended(run.job, run.code, run.seconds)
                        gc.collect()  # frees the memory of the run on the device
                if not ready:
                    time.sleep(POLL)
    except KeyboardInterrupt:  # a second one: the runs resume from their last checkpoints
        raise QueueStopped(signal.SIGINT) from None
    if interrupt.received is not None:
        raise QueueStopped(interrupt.received)


def _end_at_once(code: int) -> None:
    """End the process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Run(threading.Thread):
    """A run in a thread, which works only during :meth:`advance`.

    It has its own output, random numbers, number of CPU threads and stream.
    """

    def __init__(self, job: Job, interrupt: Interrupt, *, device: torch.device, threads: int) -> None:
        super().__init__(name=job.name, daemon=True)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.job, self.interrupt = job, interrupt
        self.code: int | None = None
        """The exit code; None: the run has not ended."""
        self._device, self._threads = device, threads
        self._until: Callable[[], bool] | None = None
        self._goes_on, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._began = self._turn_began = time.monotonic()
        self._random: dict[str, Any] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the run does not wait for the device."""
        try:
            return self._until is None or self._until()
        except RuntimeError:  # of the device, which the run reports
            return True

    @property
    def seconds(self) -> float:
        """Seconds since the run was created."""
        return time.monotonic() - self._began

    def advance(self) -> None:
        """Continue the run until it pauses or ends."""
        from trainer.checkpoint.rng import random_state, restore_random_state

        with (
            self.job.log.open("a", buffering=1, encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            self._turn_began = time.monotonic()
            if self._random is None:
                self.start()
            else:
                restore_random_state(self._random)
                self._goes_on.release()
            try:
                self._has_paused.acquire()
            except KeyboardInterrupt:
                if not self._has_paused.acquire(timeout=1.0):
                    # Python would abort where a thread is in a kernel.
                    atexit.register(_end_at_once, INTERRUPTED)
                raise
            self._random = random_state()

    def pause(self, *, until: Callable[[], bool] | None = None) -> None:
        """Let the other runs continue, until a condition is true; see `trainer.run.look_ahead.Turns`."""
        if until is None and time.monotonic() - self._turn_began < TURN:
            return
        self._until = until
        self._has_paused.release()
        self._goes_on.acquire()
        self._until = None

    def run(self) -> None:
        """Train, as ``python -m trainer`` does."""
        import torch

        code: Any = LOST
        try:
            torch.set_num_threads(self._threads)  # of this thread
            on_cuda = self._device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if on_cuda else nullcontext():
                code = main(self.job.arguments, turns=self)
        except SystemExit as error:
            code = error.code
        except BaseException:  # of a bug; the other runs continue
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self.code = code if isinstance(code, int) else LOST
            self._has_paused.release()
