"""The command that measures everything on one GPU: what fails or hangs leaves the others their figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS = {
    "works": "with open(path, 'w') as file: json.dump({'machine': MACHINE, 'rows': ROWS}, file)",
    "fails": "raise ValueError('no such card')",
    "hangs": "time.sleep(60)",
}
HEAD = (
    "import json, sys, time\n"
    "path = sys.argv[sys.argv.index('--json') + 1]\n"
    "ROWS = [{'model': 'llama_130m', 'speed': 7.0}]\n"
    "MACHINE = {'date': '2026-01-02T00:00:00', 'python': '3.12', 'torch': '2.11', 'gpu': 'some card'}\n"
)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their own up
    spec.loader.exec_module(module)
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(HEAD + text, encoding="utf-8")
    monkeypatch.setattr(module, "HERE", tmp_path)
    starter = "".join(line for line in module.STARTER.splitlines(True) if "import torch" not in line)
    monkeypatch.setattr(module, "STARTER", starter)
    programs = {name: module.Program((f"{name}.py",), 2 if name == "hangs" else 60) for name in SCRIPTS}
    monkeypatch.setattr(module, "PROGRAMS", {name: programs[name] for name in ("hangs", "fails", "works")})
    figure = {"read": module.of("speed", model="llama_130m"), "unit": "tokens/s"}
    figures = [
        module.Figure("a x b", "works", published=3.0, reach=5.0, **figure),
        module.Figure("slower", "works", reach=5.0, higher_is_better=False, **figure),
        module.Figure("broken", "fails", **figure),
        module.Figure("stuck", "hangs", **figure),
    ]
    monkeypatch.setattr(module, "FIGURES", figures)
    return module


def test_programs_that_fail_or_hang_leave_the_others_their_figures(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path / "found")])
    assert gpu.main() == 1
    result = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    found = {row["work"]: row for row in result["rows"]}
    assert found["a \N{MULTIPLICATION SIGN} b"]["measured"] == 7.0
    assert found["a \N{MULTIPLICATION SIGN} b"]["reached"] is True
    assert found["slower"]["reached"] is False
    assert found["broken"]["not_measured"] == "exit code 1: ValueError: no such card"
    assert found["stuck"]["not_measured"] == "took longer than 2 s"
    assert [program["program"] for program in result["programs"]] == ["hangs", "fails", "works"]
    assert result["works"] == [{"model": "llama_130m", "speed": 7.0}]
    said = capsys.readouterr().out
    assert "| a \N{MULTIPLICATION SIGN} b | tokens/s | 3 | **7** | 5 |  |" in said
    assert "on one some card, 2026-01-02, Python 3.12, torch 2.11" in said


def test_what_the_budget_has_no_room_for_is_named(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--budget", "0", "--output", str(tmp_path / "found")])
    assert gpu.main() == 1
    result = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert {row["not_measured"] for row in result["rows"]} == {"no time left of 0 s"}


def test_the_table_takes_its_place_in_a_text(gpu):
    result = {
        "machine": {"date": "2026-01-02", "python": "3.12"},
        "command": "python benchmarks/gpu.py",
        "rows": [],
    }
    text = gpu.quote(result, f"before\n{gpu.BEGIN}old\n{gpu.END}after\n")
    assert text.startswith(f"before\n{gpu.BEGIN}`python benchmarks/gpu.py`")
    assert text.endswith(f"{gpu.END}after\n")
    assert "old" not in text
    assert gpu.quote(result, text) == text
