"""What computed the operators goes into the manifest at its first use, and again when something new does."""

from __future__ import annotations

import pytest

from implicit_blocks.ops import backends
from trainer.reporting.backends import BackendRecord


class Folder:
    def __init__(self):
        self.kept = []

    def record_backends(self, report):
        self.kept.append(report)


class Display:
    def __init__(self):
        self.messages = []

    def log(self, line):
        self.messages.append(line)


@pytest.fixture
def _nothing_has_run(monkeypatch):
    monkeypatch.setattr(backends, "_CHOSEN", {})


@pytest.mark.usefixtures("_nothing_has_run")
def test_each_new_one_is_said_once_and_kept():
    folder, display = Folder(), Display()
    record = BackendRecord(folder, display)
    record.update()
    assert not folder.kept
    backends.note("double", "short")
    record.update()
    record.update()
    backends.note("double", "plain")  # as where an evaluation has other shapes
    backends.note("triple", "plain")
    record.update()
    assert display.messages == ["computed: double by short", "computed: double by plain, triple by plain"]
    assert folder.kept == [
        {"double": {"short": "ran"}},
        {"double": {"short": "ran", "plain": "ran"}, "triple": {"plain": "ran"}},
    ]


@pytest.mark.usefixtures("_nothing_has_run")
def test_a_manifest_that_can_t_be_written_stops_nothing():
    folder, display = Folder(), Display()

    def full(report):
        raise OSError("no space left on device")

    folder.record_backends = full
    backends.note("double", "short")
    BackendRecord(folder, display).update()
    assert (
        display.messages[1]
        == "WARNING: the backends can't be noted in the manifest (no space left on device)"
    )


@pytest.mark.usefixtures("_nothing_has_run")
def test_processes_that_write_nothing_say_nothing():
    display = Display()
    backends.note("double", "short")
    BackendRecord(None, display).update()
    assert not display.messages
