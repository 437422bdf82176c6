"""Signals that stop a run after the current step."""

from __future__ import annotations

import os
import signal

import pytest

from trainer.run import interrupt
from trainer.run.interrupt import Interrupt
from trainer.sweep.in_one_process import run_side_by_side
from trainer.sweep.queue import run_queue


def test_the_first_signal_is_kept() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as noted:
        assert noted.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.received == signal.SIGUSR1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_later_second_interrupt_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 10.5, 10.9, 11.5))
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: next(times))
    with Interrupt() as noted:
        for _ in range(3):  # by a terminal and a launcher, of one Ctrl-C
            os.kill(os.getpid(), signal.SIGINT)
        assert noted.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("one_process", [False, True])
def test_a_sweep_under_nohup_ignores_the_end_of_the_terminal(
    one_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    install = signal.signal
    monkeypatch.setattr(signal, "signal", lambda number, to: changed.append(number) or install(number, to))
    try:
        if one_process:
            run_side_by_side([], side_by_side=2, device="cpu")
        else:
            run_queue([], processes=2)
        assert signal.SIGTERM in changed
        assert signal.SIGHUP not in changed
    finally:
        install(signal.SIGHUP, before)
