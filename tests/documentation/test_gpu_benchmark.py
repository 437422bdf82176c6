"""``benchmarks/gpu.py``: programs that fail, hang or are disturbed, and its tables."""

from __future__ import annotations

import importlib
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
    "import json, os, sys, time\n"
    "path = sys.argv[sys.argv.index('--json') + 1]\n"
    "ROWS = [{'model': 'llama_130m', 'speed': 7.0, 'given': sys.argv[1:-2], 'tuned':"
    " os.environ['TRITON_CACHE_AUTOTUNING']}]\n"
    "MACHINE = {'date': '2026-01-02T00:00:00', 'python': '3.12', 'torch': '2.11', 'gpu': 'some card'}\n"
)
STARTER = (
    "import json, runpy, sys\n"
    "card, program = sys.argv[1:3]\n"
    "sys.argv = sys.argv[2:]\n"
    "if not sys.stdin.readline(): sys.exit(0)\n"
    "with open(card, 'w') as file: json.dump({'begin': {'copies_tb_s': 3.0}, 'seconds': 0.1}, file)\n"
    "runpy.run_path(program, run_name='__main__')\n"
)
QUIET = {"memory_used_gb": 0.0, "processes": 0}


def module(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    for name in ("gpu_card", "gpu_workloads", "gpu_table"):
        module(name, monkeypatch)
    loaded = module("gpu", monkeypatch)
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(HEAD + text, encoding="utf-8")
    (tmp_path / "starter.py").write_text(STARTER, encoding="utf-8")
    monkeypatch.setattr(loaded, "HERE", tmp_path)
    monkeypatch.setattr(loaded, "STARTER", tmp_path / "starter.py")
    monkeypatch.setattr(loaded.gpu_card, "seen", lambda: QUIET)
    programs = {name: loaded.Program((f"{name}.py",), 1 if name == "hangs" else 60) for name in SCRIPTS}
    monkeypatch.setattr(loaded, "PROGRAMS", {name: programs[name] for name in ("hangs", "fails", "works")})
    table = loaded.gpu_table
    figure = {"read": table.of("speed", model="llama_130m"), "unit": "tokens/s"}
    figures = [
        table.Figure("a x b", "works", published=3.0, target=5.0, **figure),
        table.Figure("slower", "works", target=5.0, higher_is_better=False, **figure),
        table.Figure("broken", "fails", **figure),
        table.Figure("stuck", "hangs", **figure),
        table.Figure("both", ("works", "fails"), **figure),
    ]
    monkeypatch.setattr(table, "FIGURES", figures)
    return loaded


def run(gpu, monkeypatch, tmp_path, *options):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path / "found"), *options])
    code = gpu.main()
    return code, json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))


def test_failing_and_hanging_programs_do_not_affect_others(gpu, monkeypatch, tmp_path, capsys):
    code, result = run(gpu, monkeypatch, tmp_path, "--prepare", "0")
    assert code == 1
    found = {row["work"]: row for row in result["rows"]}
    assert found["a \N{MULTIPLICATION SIGN} b"]["measured"] == 7.0
    assert found["a \N{MULTIPLICATION SIGN} b"]["reached"] is True
    assert found["slower"]["reached"] is False
    assert found["broken"]["not_measured"] == "exit code 1: ValueError: no such card"
    assert found["stuck"]["not_measured"] == "took longer than 1 s"
    assert found["both"]["measured"] is None
    assert [program["program"] for program in result["programs"]] == ["hangs", "fails", "works"]
    assert result["works"] == [{"model": "llama_130m", "speed": 7.0, "given": [], "tuned": "1"}]
    message = capsys.readouterr().out
    assert "hangs: repeated" in message
    assert "| a \N{MULTIPLICATION SIGN} b | tokens/s | 3 | **7** | 5 |  |" in message
    assert "on one some card, 2026-01-02, Python 3.12, torch 2.11" in message
    assert (
        "The GPU was otherwise idle before and after each program (copy bandwidth 3.00 to 3.00 TB/s). "
        in message
    )


def test_programs_prepare_in_parallel(gpu, monkeypatch, tmp_path):
    code, result = run(gpu, monkeypatch, tmp_path, "--programs", "works")
    assert code == 0
    assert result["prepared"] == {"works": 0.1}
    assert "longer than 1 s" in gpu.prepare(["hangs"], tmp_path, tiny=False, seconds=1)["hangs"]


def test_the_time_limit_of_a_program_leaves_time_for_others(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "PROGRAMS", {"slow": gpu.Program(("slow.py",), 150)})
    assert gpu.share("slow", 390.0, 13) == 90.0
    assert gpu.share("slow", 390.0, 2) == 150
    assert gpu.share("slow", 60.0, 13) == gpu.SHARE
    assert gpu.share("slow", 20.0, 13) == 20.0


def test_parallel_preparation_respects_the_memory_of_the_gpu(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.gpu_card, "free_gb", lambda: 10.0)
    programs = {name: gpu.Program(("works.py",), 60, preparing_gb=gb) for name, gb in (("a", 9), ("b", 5))}
    programs["c"] = gpu.Program(("hangs.py",), 60, preparing_gb=30)
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    begun = []
    monkeypatch.setattr(gpu.Process, "begin", spied(gpu.Process.begin, begun))
    assert gpu.prepare(["a", "b"], tmp_path, tiny=False, seconds=30) == {"a": 0.1, "b": 0.1}
    assert len(begun) == 2
    assert begun[0].ended  # before the other one began
    assert gpu.prepare(["c", "b"], tmp_path, tiny=False, seconds=1) == {
        "c": "took longer than 1 s",  # exceeds the memory, so it runs alone
        "b": "no room in 1 s",
    }


def spied(method, calls):
    def called(self, *arguments):
        calls.append(self)
        return method(self, *arguments)

    return called


def test_failed_rows_are_measured_again(gpu, monkeypatch, tmp_path, capsys):
    (tmp_path / "works.py").write_text(
        f"{HEAD}mark = {str(tmp_path / 'mark')!r}\n"
        "rows = ROWS if os.path.exists(mark) else [{'model': 'llama_130m', 'failed': 'no memory'}]\n"
        "open(mark, 'w').close()\n"
        "with open(path, 'w') as file: json.dump({'machine': MACHINE, 'rows': rows}, file)"
    )
    _, result = run(gpu, monkeypatch, tmp_path, "--prepare", "0", "--programs", "works")
    assert "works: repeated" in capsys.readouterr().out
    assert result["rows"][0]["measured"] == 7.0


def test_a_program_without_preparation_is_not_prepared(gpu, monkeypatch, tmp_path):
    programs = {"works": gpu.Program(("works.py",), 60, for_preparing=None)}
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    code, result = run(gpu, monkeypatch, tmp_path)
    assert code == 0
    assert result["prepared"] == {}
    assert result["works"][0]["tuned"] == "1"


def test_programs_beyond_the_budget_are_reported(gpu, monkeypatch, tmp_path):
    code, result = run(gpu, monkeypatch, tmp_path, "--budget", "0")
    assert code == 1
    assert {row["not_measured"] for row in result["rows"]} == {"skipped: budget of 0 s exhausted"}


def test_a_disturbed_program_is_repeated(gpu, monkeypatch, tmp_path):
    looks = iter([QUIET, {**QUIET, "processes": 1}, QUIET])
    monkeypatch.setattr(gpu.gpu_card, "once_quiet", lambda patience: next(looks, QUIET))
    code, result = run(gpu, monkeypatch, tmp_path, "--prepare", "0", "--programs", "works")
    assert code == 0
    assert not any("disturbed" in row for row in result["rows"])
    monkeypatch.setattr(gpu.gpu_card, "once_quiet", lambda patience: {**QUIET, "memory_used_gb": 20.0})
    _, result = run(gpu, monkeypatch, tmp_path, "--prepare", "0", "--programs", "works")
    assert all(row["disturbed"] for row in result["rows"])
    message = gpu.gpu_table.quoted_tables(result)
    assert "Other work DISTURBED the GPU (works: before: 20.0 GB used, after: 20.0 GB used)" in message
    assert "**7** (disturbed)" in message


def test_a_lower_copy_bandwidth_is_a_disturbance(gpu):
    programs = {
        "one": {"card": {"before": QUIET, "begin": {"copies_tb_s": 3.0}, "end": {"copies_tb_s": 2.9}}},
        "other": {"card": {"before": QUIET, "begin": {"copies_tb_s": 2.0, "processes": 2}}},
    }
    gpu.judge(programs)
    assert programs["one"]["disturbed"] == []
    found = ["begin: 1 other process", "begin: copy bandwidth 2.00 TB/s, up to 3.00 at other times"]
    assert programs["other"]["disturbed"] == found


def test_a_missing_or_incomplete_nvidia_smi_is_accepted(monkeypatch, tmp_path):
    card = module("gpu_card", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.seen() == {}
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *gpu=*) echo "80, [N/A], 1980, 31, 70.1";; *) echo 7;; esac\n'
    )
    program.chmod(0o755)
    assert card.seen() == {
        "memory_used_gb": 0.08,
        "busy_percent": None,
        "clock_mhz": 1980.0,
        "celsius": 31.0,
        "watt": 70.1,
        "processes": 1,
    }


def test_the_table_has_the_utilization_of_training(gpu):
    work = "llama_130m_bounded"
    figure = gpu.gpu_table.trained(work, "works", "llama", target=9, stretch_target=12)
    row = {"work": work, "tokens_per_second": 7, "share_of_card": 0.444}
    line = figure.row({"works": {"rows": [row]}})
    assert (
        gpu.gpu_table.table({"rows": [line]}).splitlines()[-1]
        == "| llama | tokens/s | 64,687 | 7 (target missed), 44 % | 9 | 12 |"
    )


def test_the_recorded_command_has_the_preparation_time(gpu, monkeypatch, tmp_path):
    _, result = run(gpu, monkeypatch, tmp_path, "--prepare", "0", "--programs", "works")
    assert result["command"] == "python benchmarks/gpu.py --programs works --prepare 0"


def test_tuning_results_of_the_preparation_are_not_saved(monkeypatch):
    cache = pytest.importorskip("torch._inductor.runtime.autotune_cache")
    module("gpu_card", monkeypatch)
    monkeypatch.setattr(
        cache.AutotuneCache, "save", cache.AutotuneCache.save
    )  # so that monkeypatch restores it
    module("gpu_program", monkeypatch).keep_no_choices()
    kept = cache.AutotuneCache("of some variants", local_cache=None)
    assert kept.save(object(), 7, found_by_coordesc=False, triton_cache_hash="") is None


def test_the_steps_of_the_trainer_have_a_separate_table(gpu):
    row = {"spec": "llama_1.3b", "phase": "free", "searches": "32+4", "rows": 4, "length": 2048}
    row |= {"checkpoint_activations": "steps", "tokens_per_second": 9169, "iterations": 3.04}
    row |= {"published_tokens_per_second": None, "published_iterations": None, "published_gb": None}
    row |= {"reserved_gb": 61.5, "allocated_gb": 44.0}
    result = {"machine": {"date": "2026-01-02", "python": "3.12"}, "command": "c", "rows": []}
    result["zoo"] = [row, {"spec": "mamba2_1.3b", "phase": "free", "failed": "too few steps"}]
    message = gpu.gpu_table.quoted_tables(result).splitlines()
    size = "4 \N{MULTIPLICATION SIGN} 2048"
    line = f"| `llama_1.3b` free (32+4), step checkpointing | {size} | 3.0 | 9,169 |  | 44 | 61.5 |  |"
    assert message[-1] == line
    assert gpu.gpu_table.zoo_table({**result, "zoo": []}) == ""


def test_missing_figures_are_grouped_by_cause(gpu):
    works = [
        (
            "large",
            None,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has 1",
        ),
        ("small", 1.0, None),
        ("memory", None, "exit code 1: RuntimeError: broken."),
        ("free", None, "RuntimeError: broken."),
        ("huge", None, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ]
    rows = [{"work": work, "measured": value, "not_measured": why} for work, value, why in works]
    assert gpu.gpu_table.not_measured({"rows": rows}).splitlines() == [
        "Not measured in this run, by cause:",
        "",
        "- `torch.OutOfMemoryError: CUDA out of memory`: large; huge",
        "- `RuntimeError: broken`: memory; free",
    ]
    assert gpu.gpu_table.not_measured({"rows": rows[1:2]}) == ""


def test_quote_replaces_the_tables_in_a_text(gpu):
    table = gpu.gpu_table
    result = {
        "machine": {"date": "2026-01-02", "python": "3.12"},
        "command": "python benchmarks/gpu.py",
        "rows": [],
    }
    text = table.quote(result, f"before\n{table.BEGIN}yesterday\n{table.END}after\n")
    assert text.startswith(f"before\n{table.BEGIN}`python benchmarks/gpu.py`")
    assert text.endswith(f"{table.END}after\n")
    assert "yesterday" not in text
    assert table.quote(result, text) == text


def test_the_longest_preparation_starts_first(gpu, monkeypatch, tmp_path):
    programs = {name: gpu.Program(("works.py",), 60, preparing_s=s) for name, s in (("a", 5), ("b", 50))}
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    began = []
    process = gpu.Process

    def made(name, **how):
        began.append(name)
        return process(name, **how)

    monkeypatch.setattr(gpu, "Process", made)
    gpu.prepare(["a", "b"], tmp_path, tiny=False, seconds=30)
    assert began == ["b", "a"]
