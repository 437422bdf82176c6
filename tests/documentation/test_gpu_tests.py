"""What came of the tests that need a GPU is kept: counts of each file, why some failed or were left out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "gpu_tests", raising=False)
    return importlib.import_module("gpu_tests")


def report(name, *, when="call", outcome="passed", said="", duration=1.0):
    return SimpleNamespace(
        nodeid=f"tests/gpu/test_it.py::{name}",
        when=when,
        duration=duration,
        longrepr=said,
        failed=outcome == "failed",
        skipped=outcome == "skipped",
    )


def test_counts_failures_and_reasons(program, tmp_path, capsys):
    recorder = program.Recorder(tmp_path / "kept.json", "the command")
    for each in (
        report("one", when="setup", duration=0.5),
        report("one"),
        report("two", outcome="failed", said="some line\nE   ValueError: too wide\nE   another"),
        report("three", when="setup", outcome="skipped", said=("path", 3, "Skipped: no such card")),
        report("four", when="setup", outcome="skipped", said=("path", 9, "Skipped: no such card")),
    ):
        recorder.pytest_runtest_logreport(each)
    recorder.write(complete=False)
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert kept["complete"] is False
    assert kept["command"] == "the command"
    assert kept["in_all"] == {"passed": 1, "failed": 1, "skipped": 2}
    assert kept["files"]["tests/gpu/test_it.py"]["seconds"] == 4.5
    assert kept["failures"] == {"tests/gpu/test_it.py::two [call]": "E   ValueError: too wide\nE   another"}
    assert kept["skipped"] == {"no such card": ["tests/gpu/test_it.py::four", "tests/gpu/test_it.py::three"]}
    assert kept["slowest"]["tests/gpu/test_it.py::one"] == 1.5
    assert "ValueError: too wide" in capsys.readouterr().out


def test_only_files_with_such_tests_are_read(program):
    found = program.files_with_the_mark()
    assert "tests/gpu/test_graphs.py" in found
    assert "tests/test_overflow.py" in found
    assert not [name for name in found if name.startswith("tests/specs")]
