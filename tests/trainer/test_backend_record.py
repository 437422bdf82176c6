"""The backends that computed the operators are recorded in the manifest when a new one has run."""

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
def test_each_new_backend_is_logged_once_and_recorded():
    folder, display = Folder(), Display()
    record = BackendRecord(folder, display)
    record.update()
    assert not folder.kept
    backends.note("double", "short")
    record.update()
    record.update()
    backends.note("double", "plain")  # as an evaluation with other shapes does
    backends.note("triple", "plain")
    record.update()
    assert display.messages == ["backends: double by short", "backends: double by plain, triple by plain"]
    assert folder.kept == [
        {"double": {"short": "ran"}},
        {"double": {"short": "ran", "plain": "ran"}, "triple": {"plain": "ran"}},
    ]


@pytest.mark.usefixtures("_nothing_has_run")
def test_a_missing_package_that_would_be_faster_is_logged_with_the_remedy(monkeypatch):
    monkeypatch.setattr(backends, "missing_package", lambda operation, backend: "mamba-ssm")
    display = Display()
    backends.note("double", "plain")
    BackendRecord(Folder(), display).update()
    assert display.messages[1].startswith("mamba-ssm would compute double faster here; install it (pip ")


@pytest.mark.usefixtures("_nothing_has_run")
def test_the_run_continues_if_the_manifest_cannot_be_written():
    folder, display = Folder(), Display()

    def full(report):
        raise OSError("no space left on device")

    folder.record_backends = full
    backends.note("double", "short")
    BackendRecord(folder, display).update()
    assert (
        display.messages[1]
        == "WARNING: the backends can't be recorded in the manifest (no space left on device)"
    )


@pytest.mark.usefixtures("_nothing_has_run")
def test_processes_without_a_folder_log_nothing():
    display = Display()
    backends.note("double", "short")
    BackendRecord(None, display).update()
    assert not display.messages
