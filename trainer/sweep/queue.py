"""A queue of runs, several at once, each in a process of its own. Imports no torch.

The processes are forked from a server that has imported torch once but has not used it, so that a run starts
in a fraction of a second and a run that fails takes no other with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from trainer.run.interrupt import hang_ups

_PRELOADED = [
    "implicit_blocks._utils.own_trainer",  # first: the server would import a user's trainer.py
    "trainer.run.build",
    "implicit_blocks.models.implicit",
    "implicit_blocks.mixers",
    "implicit_blocks.gradients",
    "implicit_blocks.solvers",
    "matplotlib.backends.backend_agg",  # every run draws a picture
]


@dataclass(frozen=True)
class Job:
    """A call of ``python -m trainer`` with its arguments; its output goes to the file ``log``."""

    name: str
    arguments: tuple[str, ...]
    log: Path


class _Signal(BaseException):
    """A signal was received; its number is the argument."""


class QueueStopped(Exception):  # noqa: N818  # requested by the user, not an error
    """A signal, its argument, stopped the queue; the runs in progress have been saved."""


def run_queue(
    jobs: Sequence[Job],
    *,
    processes: int,
    threads: int | None = None,
    ended: Callable[[Job, int, float], object] = lambda job, code, seconds: None,
) -> None:
    """Run the jobs in order, up to ``processes`` at once.

    A signal that ends programs (Ctrl-C, SIGTERM) is passed on to the runs, which save and end.

    Args:
        jobs: the runs.
        processes: maximum number at once.
        threads: CPU threads of each run whose spec does not set them; None: torch's default.
        ended: called with the exit code, negative for a signal, and the seconds of each run that ends.

    Raises:
        QueueStopped: by a signal.

    """
    context = _context()
    waiting = list(jobs)
    running: dict[int, tuple[BaseProcess, Job, float]] = {}

    def reap() -> None:
        """Wait for the end of a run."""
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int)
            process, job, since = running.pop(sentinel)
            process.join()
            ended(job, int(process.exitcode or 0), time.monotonic() - since)

    with _raising_signals():
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    job = waiting.pop(0)
                    job.log.parent.mkdir(parents=True, exist_ok=True)
                    # A daemon: it ends with this process, whatever ends that.
                    process = context.Process(
                        target=_train, args=(job.arguments, str(job.log), threads), daemon=True
                    )
                    process.start()
                    running[process.sentinel] = process, job, time.monotonic()
                reap()
        except _Signal as received:
            for each, _, _ in running.values():
                each.terminate()
            try:
                while running:
                    reap()
            except _Signal:  # a second one: the runs resume from their last checkpoints
                for each, _, _ in running.values():
                    each.kill()
            raise QueueStopped(*received.args) from None


def _context() -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _train(arguments: Sequence[str], log: str, threads: int | None) -> None:
    """Run ``python -m trainer`` in this process; the parent alone receives the signals of the terminal."""
    if hasattr(os, "setsid"):
        os.setsid()
    with open(log, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from trainer.cli.train import main

    sys.exit(main(list(arguments)))


@contextlib.contextmanager
def _raising_signals() -> Iterator[None]:
    """Context in which the signals that end programs raise :class:`_Signal`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Signal(number)

    numbers = [signal.SIGINT, signal.SIGTERM, *hang_ups()]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
