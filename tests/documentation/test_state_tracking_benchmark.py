"""``benchmarks/state_tracking.py``, which trains ten tasks with several models."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGINS = {"gated-deltanet": "implicit_blocks_gated_deltanet", "rwkv7": "implicit_blocks_rwkv7"}
SMALL = [
    *("model.d_model=32", "model.mixer.d_state=8", "model.mixer.head_dim=8", "model.mixer.chunk_size=8"),
    *("model.at_evaluation.stopping.max_iterations=8", "phases=[]", "data.seq_len=8"),
    *("training.max_steps=4", "training.batch_size=4", "training.ema=null", "training.loader_threads=0"),
    *("evaluation.lengths=[8,16]", "evaluation.sequences=4", "evaluation.last_tokens=8"),
]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    program = importlib.import_module("state_tracking")
    monkeypatch.setattr(importlib.import_module("report"), "RESULTS", tmp_path / "results")
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results")
    return program


def run(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    monkeypatch.setattr("sys.argv", ["state_tracking.py", "--runs", str(tmp_path / "runs"), *words, *SMALL])
    assert program.main() == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "results" / "state_tracking.json").read_text())[
        "rows"
    ]
    return rows


def test_finished_runs_are_read_and_new_ones_added(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--tasks",
        "parity",
        "--learning-rates",
        "1e-3",
        "--device",
        "cpu",
        "--models",
        "implicit-mamba2",
    )
    first = run(program, monkeypatch, tmp_path, *words)
    rows = run(program, monkeypatch, tmp_path, *words, "attention")
    assert [row["model"] for row in rows] == ["implicit-mamba2", "attention"]
    assert rows[0] == first[0]
    assert [test["length"] for test in rows[1]["tests"]] == [8, 16]
    monkeypatch.setattr("sys.argv", ["state_tracking.py", "--table"])
    capsys.readouterr()
    assert program.main() == 0
    shares = " | ".join(f"{100 * row['tests'][-1]['accuracy']:.2f}" for row in rows)
    assert f"| `parity` | {shares} |" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["hybrid", "mamba2", "attention", "gated-deltanet", "rwkv7"])
def test_explicit_models_have_nearly_the_size_of_the_implicit_one(program: Any, model: str) -> None:
    for plugin in PLUGINS.values():
        pytest.importorskip(plugin)
    implicit, explicit = (
        program.spec_of("state_tracking", "dyck", name, 1e-3, 0, []) for name in ("implicit-hybrid", model)
    )
    assert 0.65 < program.parameters(explicit) / program.parameters(implicit) < 1.3
    assert explicit.model.kind == "explicit_lm"
    assert [phase.data.seq_len for phase in explicit.phase_specs()] == [8, 16, 32, 64]
    assert explicit.total_steps == implicit.total_steps


@pytest.mark.parametrize("mixer", ["rwkv7", "hybrid"])
@pytest.mark.parametrize("spec", ["state_tracking", "state_tracking_small"])
def test_an_implicit_model_with_another_mixer_has_the_search_of_the_spec(
    program: Any, spec: str, mixer: str
) -> None:
    pytest.importorskip(PLUGINS["rwkv7"])
    first, other = (
        program.spec_of(spec, "dyck", name, 1e-3, 0, ["model.mixer.d_conv=4"])
        for name in ("implicit-mamba2", f"implicit-{mixer}")
    )
    assert 0.65 < program.parameters(other) / program.parameters(first) < 1.6
    assert (other.model.kind, other.model.mixer.kind) == ("implicit_lm", mixer)
    rwkv7 = other.model.mixer.mixers[1] if mixer == "hybrid" else other.model.mixer
    assert rwkv7.negative_eigenvalues
    for name in ("solver", "gradient", "stopping", "at_evaluation", "d_model"):
        assert getattr(other.model, name) == getattr(first.model, name)
    assert [phase.model for phase in other.phases] == [phase.model for phase in first.phases]


def made_up(model: str, rate: float, near: float, far: float, **changes: Any) -> dict[str, Any]:
    tests = [{"accuracy": near, "loss": changes.pop("loss", 0.1)}, {"accuracy": far}]
    run = {"task": "dyck", "model": model, "seed": 0, "learning_rate": rate, "steps": 9, "of_steps": 9}
    return {**run, "tests": tests, **changes}


def test_the_learning_rate_is_chosen_at_the_training_length(program: Any) -> None:
    rows = [made_up("rwkv7", 1e-3, 0.9, 0.5), made_up("rwkv7", 3e-3, 0.8, 0.7)]
    assert program.table(rows).splitlines()[-1] == "| `dyck` | 50.00 |"
    equal = [made_up("rwkv7", 1e-3, 0.9, 0.5), made_up("rwkv7", 3e-3, 0.9, 0.7, loss=0.05)]
    assert program.table(equal).splitlines()[-1] == "| `dyck` | 70.00 |"


def test_the_table_compares_with_the_best_explicit_model_and_marks_unfinished_runs(program: Any) -> None:
    rows = [
        made_up("implicit-hybrid", 1e-3, 1.0, 0.9912),
        made_up("rwkv7", 1e-3, 0.9, 0.99, steps=8),
        made_up("mamba2", 1e-3, 0.9, 0.9934),
        {**made_up("rwkv7", 1e-3, 0.9, 0.5), "task": "stack"},
    ]
    assert program.table(rows).splitlines()[2:] == [
        "| `dyck` | 99.12 | 99.34 | 99.00† | -0.22 |",
        "| `stack` | - | - | 50.00 | - |",
    ]
    several = [*rows, made_up("implicit-hybrid", 1e-3, 1.0, 0.9988, seed=1)]
    assert program.table(several).splitlines()[2] == "| `dyck` | 99.12, 99.88 | 99.34 | 99.00† | +0.16 |"


def test_invalid_combinations_are_refused_before_training(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv",
        [
            "state_tracking.py",
            "--tasks",
            "code_trace",
            "--runs",
            str(tmp_path),
            "data.seq_len=4",
            "phases=[]",
        ],
    )
    assert program.main() == 2
    assert "seq_len" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["state_tracking", "state_tracking_laptop"])
def test_the_documented_table_is_that_of_the_results(program: Any, name: str) -> None:
    results = json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text())
    assert program.table(results["rows"]) in (REPOSITORY / "docs/reasoning.md").read_text()


def test_the_documented_headline_is_that_of_the_results(program: Any) -> None:
    rows = json.loads((REPOSITORY / "benchmarks/results/state_tracking.json").read_text())["rows"]
    best = {task: program._best(rows, task, program.SIZE_OF)[0] for task in program.TASKS}
    assert sum(row["tests"][-1]["accuracy"] >= 0.99 for row in best.values()) == 9
    for task, row in best.items():
        explicit = [found for model in program.EXPLICIT for found in program._best(rows, task, model)]
        assert row["tests"][-1]["accuracy"] >= max(found["tests"][-1]["accuracy"] for found in explicit)
    iterations = {task: round(row["tests"][-1]["iterations"]) for task, row in best.items()}
    least, most = (how(iterations, key=iterations.__getitem__) for how in (min, max))
    page = " ".join((REPOSITORY / "docs/reasoning.md").read_text().split())
    assert f"{iterations[least]} (`{least}`) to {iterations[most]} times (`{most}`)" in page


def test_the_picture_is_drawn(program: Any, tmp_path: Path) -> None:
    results = json.loads((REPOSITORY / "benchmarks/results/state_tracking.json").read_text())
    program.draw(results["rows"], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
