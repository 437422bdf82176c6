"""Signals that stop a run after the current step."""

from __future__ import annotations

import os
import signal

import pytest

from trainer.run import interrupt
from trainer.run.interrupt import Interrupt


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
