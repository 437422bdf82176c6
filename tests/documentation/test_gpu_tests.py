"""``benchmarks/gpu_tests.py`` stores the last outcome of every GPU test, with the reasons of failures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/gpu/test_it.py"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "gpu_tests", raising=False)
    return importlib.import_module("gpu_tests")


def report(name, *, when="call", outcome="passed", message="", duration=1.0, caplog=""):
    return SimpleNamespace(
        caplog=caplog,
        nodeid=f"{FILE}::{name}",
        when=when,
        duration=duration,
        longrepr=message,
        failed=outcome == "failed",
        skipped=outcome == "skipped",
    )


def kept(recorder, path, reports, **how):
    for each in reports:
        recorder.pytest_runtest_logreport(each)
    recorder.write(**{"complete": False} | how)
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_record_has_outcomes_failures_and_reasons(program, tmp_path, capsys):
    path = tmp_path / "kept.json"
    recorder = program.Recorder(path, "the command")
    reports = [
        report("one", when="setup", duration=0.5),
        report("one"),
        report(
            "two",
            outcome="failed",
            message="some line\nE   ValueError: too wide\nE   another",
            caplog="a warning",
        ),
        report("three", when="setup", outcome="skipped", message=("path", 3, "Skipped: no such card")),
        report("four", when="setup", outcome="skipped", message=("path", 9, "Skipped: no such card")),
        report("five"),
        report("five", when="teardown", outcome="failed", message="E   left something"),
        report("six", when="setup"),  # it is running
    ]
    found = kept(recorder, path, reports)
    assert found["complete"] is False
    ((_, run),) = found["runs"].items()
    assert run["command"] == "the command"
    assert "torch" in run["machine"]
    assert found["in_all"] == run["in_all"] | {"passed": 1, "failed": 2, "skipped": 2}
    assert found["files"][FILE]["seconds"] == 6.5
    assert found["failures"] == {
        f"{FILE}::five": "[teardown] E   left something",
        f"{FILE}::two": "[call] E   ValueError: too wide\nE   another\na warning",
    }
    assert found["skipped"] == {"no such card": [f"{FILE}::four", f"{FILE}::three"]}
    assert found["slowest"][f"{FILE}::one"] == 1.5
    assert f"{FILE}::six" not in found["tests"]
    assert "ValueError: too wide" in capsys.readouterr().out


def test_tests_that_a_run_did_not_reach_keep_their_outcome(program, tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    dates = iter([f"2026-01-0{day}" for day in range(1, 5)])
    monkeypatch.setattr(program, "machine", lambda: {"date": next(dates), "gpu": "a card"})
    failed = report("two", outcome="failed", message="E   too wide")
    elsewhere = report("four")
    elsewhere.nodeid = "other.py::four"
    kept(program.Recorder(path, "first"), path, [report("one"), failed, report("gone"), elsewhere])
    second = program.Recorder(path, "second")
    second.pytest_collection_finish(
        SimpleNamespace(items=[SimpleNamespace(nodeid=f"{FILE}::{name}") for name in ("one", "two", "new")])
    )
    found = kept(second, path, [report("two")])
    assert {name.partition("::")[2]: test["run"] for name, test in found["tests"].items()} == {
        "four": "2026-01-01",
        "gone": "2026-01-01",
        "one": "2026-01-01",
        "two": "2026-01-02",
    }
    assert found["in_all"] == {"passed": 4, "failed": 0, "skipped": 0}
    assert found["failures"] == {}
    assert found["unseen"] == [f"{FILE}::new"]
    assert {date: run["command"] for date, run in found["runs"].items()} == {
        "2026-01-01": "first",
        "2026-01-02": "second",
    }
    third = program.Recorder(path, "whole files", whole=True)
    third.pytest_xdist_node_collection_finished(None, [f"{FILE}::{name}" for name in ("one", "two", "new")])
    found = kept(third, path, [report("new")])
    assert set(found["tests"]) == {"other.py::four"} | {f"{FILE}::{name}" for name in ("one", "two", "new")}
    fourth = program.Recorder(path, "all", whole=True, everything=True)
    fourth.pytest_xdist_node_collection_finished(None, [f"{FILE}::{name}" for name in ("one", "two", "new")])
    found = kept(fourth, path, [report("one"), report("two"), report("new")], complete=True)
    assert set(found["tests"]) == {f"{FILE}::{name}" for name in ("one", "two", "new")}
    assert list(found["runs"]) == ["2026-01-04"]  # the last outcome of every test is from this run
    assert found["unseen"] == []


def test_anew_discards_known_outcomes(program, tmp_path):
    path = tmp_path / "kept.json"
    kept(program.Recorder(path, "first"), path, [report("one", duration=40), report("two")])
    second = program.Recorder(path, "second", anew=True)
    names = [f"{FILE}::{name}" for name in ("one", "two")]
    second.pytest_xdist_node_collection_finished(None, names)
    assert second.seconds == dict(zip(names, (40.0, 1.0), strict=True))
    found = kept(second, path, [report("two")])
    assert set(found["tests"]) == {names[1]}
    assert found["unseen"] == [names[0]]
    assert [run["command"] for run in found["runs"].values()] == ["second"]


def ordered(program, monkeypatch, tmp_path, names, outcomes, seconds):
    known = tmp_path / "known.json"
    known.write_text(json.dumps({"outcomes": outcomes, "seconds": seconds}), encoding="utf-8")
    monkeypatch.setenv(program.KNOWN, str(known))
    items = [SimpleNamespace(nodeid=name) for name in names]
    program.pytest_collection_modifyitems(items)
    return "".join(item.nodeid for item in items)


def test_unknown_tests_run_first_then_failed_ones(program, tmp_path, monkeypatch):
    outcomes = {"a": "passed", "b": "failed", "d": "skipped"}
    assert ordered(program, monkeypatch, tmp_path, "abcde", outcomes, {}) == "cebad"


def test_long_and_short_tests_alternate(program, tmp_path, monkeypatch):
    seconds = {"a": 1, "b": 9, "c": 5, "d": 7, "e": 3}
    assert ordered(program, monkeypatch, tmp_path, "abcde", {}, seconds) == "badec"
    outcomes = dict.fromkeys("abd", "passed") | {"c": "failed"}
    assert ordered(program, monkeypatch, tmp_path, "abcde", outcomes, seconds) == "ecbad"


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_program_runs_a_test_and_stores_its_outcome(processes, tmp_path):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    words = ["--processes", processes, "--output", str(tmp_path / "kept"), "-p", "no:cacheprovider"]
    chosen = "tests/trainer/test_trainer_gpu.py::test_a_device_that_is_not_there_is_refused"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_tests.py", *words, chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert found["complete"]
    assert found["tests"][chosen]["outcome"] in {"passed", "skipped"}
    assert found["unseen"] == []


def test_a_pytest_plugin_that_warns_about_xdist_is_disabled(tmp_path):
    (tmp_path / "fake_benchmark.py").write_text(
        "import warnings\ndef pytest_configure(config):\n    warnings.warn('xdist is active')\n"
    )
    info = tmp_path / "fake_benchmark-5.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-benchmark\nVersion: 5.1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbenchmark = fake_benchmark\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/packaging/test_sdist.py",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: only slow tests
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_only_files_with_gpu_tests_are_collected(program):
    found = program.files_with_the_mark()
    assert "tests/gpu/test_graphs.py" in found
    assert "tests/search/test_overflow.py" in found
    assert not [name for name in found if name.startswith("tests/specs")]


def test_files_with_a_mark_from_elsewhere_are_collected(program, tmp_path, monkeypatch):
    texts = {
        "tests/gpu/test_imported.py": "from tests.gpu.interpreter import MARKS\npytestmark = MARKS\n",
        "tests/gpu/test_without.py": "",
        "tests/ops/test_imported.py": "from tests.gpu.interpreter import MARKS\npytestmark = MARKS\n",
        "tests/ops/test_marked.py": "import pytest\npytestmark = pytest.mark.gpu\n",
        "tests/ops/test_other.py": "from implicit_blocks import gpu_kernels\n",
        "tests/gpu/interpreter.py": "import pytest\nMARKS = [pytest.mark.gpu]\n",
        "plugins/one/tests/test_marked.py": "from pytest import mark\npytestmark = mark.gpu\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.files_with_the_mark() == sorted(
        set(texts) - {"tests/ops/test_other.py", "tests/gpu/interpreter.py"}
    )


def test_all_other_files_have_no_gpu_tests(program):
    found = {
        str(path.relative_to(ROOT))
        for folder in ("tests", "plugins")
        for path in (ROOT / folder).rglob("test_*.py")
    }
    others = sorted(found - set(program.files_with_the_mark()))
    words = ["-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *words, *others], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr


def test_outcomes_of_the_gpu_tests():
    found = json.loads((ROOT / "benchmarks" / "results" / "gpu_tests.json").read_text(encoding="utf-8"))
    ((last, run),) = found["runs"].items()
    assert {test["run"] for test in found["tests"].values()} == {last}
    counts = run["in_all"]
    ran = sum(counts.values())
    assert ran == len(found["tests"])
    assert found["in_all"] == counts
    assert found["unseen"] == []
    assert found["failures"] == {}
    assert counts["failed"] == 0
    assert run["complete"]
    assert run["machine"]["gpu"] == "NVIDIA H200"
    page, notes = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("docs/backends.md", "benchmarks/NOTES.md")
    )
    assert f"all {ran} GPU tests in one run" in page
    text = f"{counts['passed']} passed, {counts['skipped']} were skipped with their reasons"
    assert (
        f"{text} (nine of `fla`, eight of models without a search, which have no tokens in flight, one of"
        in page
    )
    skipped = {why.split()[0]: 0 for why in found["skipped"]}
    for why, names in found["skipped"].items():
        skipped[why.split()[0]] += len(names)
    assert skipped == {"fla": 9, "this": 8, "rows": 1}
    text = "(2026-11-30, one of two H200s, beside trainings, 16 processes,"
    assert f"{text} {run['wall_seconds']:.0f} s)" in notes
    assert last.startswith("2026-11-30")
    assert run["command"].endswith("--processes 16")
    assert f"of all {ran} tests **{counts['passed']} passed and none failed**" in notes
    assert f"{counts['skipped']} were skipped: seven backward passes of fla" in notes
    single, *windows, ends = (
        found["files"][f"tests/gpu/test_{name}.py"]["passed"]
        for name in (
            "step_kernels",
            "window_kernels",
            "window_kernels_not_finite",
            "window_tiles",
            "fused_ends",
        )
    )
    assert f"{single} of single tokens (`test_step_kernels.py`), {sum(windows)} of windows" in notes
    assert f"and {ends} of texts with prelude and coda" in notes
