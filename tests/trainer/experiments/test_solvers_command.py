"""``python -m trainer.experiments solvers``: numbers, plots and invalid requests, on a small trained run."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from trainer.experiments.cli import main
from trainer.run.build import build
from trainer.specs.run import RunSpec

LENGTH = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    spec = RunSpec.model_validate(
        {
            "model": {
                "kind": "implicit_lm",
                "d_model": 16,
                "n_layers": 1,
                "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
                "gradient": {"kind": "phantom", "steps": 2},
                "stopping": {"max_iterations": 16},
            },
            "data": {"kind": "word_problem", "group": "Z2", "identity_probability": 0.5, "seq_len": LENGTH},
            "training": {
                "max_steps": 30,
                "batch_size": 16,
                "optimizer": {"kind": "adamw", "learning_rate": 5e-3},
                "schedule": {"kind": "warmup_linear"},
                "threads": 1,
            },
            "phases": [
                {"name": "unrolled", "until": 0.8, "model": {"gradient": {"kind": "unrolled", "steps": 4}}},
                {"name": "free"},
            ],
            "evaluation": {"sequences": 4, "batch_size": 4, "last_tokens": 4},
        }
    )
    folder = tmp_path_factory.mktemp("solvers") / "run"
    build(spec, output=folder, device="cpu").train()
    return folder


def test_selected_configurations_are_measured_and_plotted(trained, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--checkpoint", str(trained), "--tolerances", "0.1", "--sequences", "2", "--repeats", "1"]
    arguments += ["--only", "damping 0.8", "windows of 4", "--max-iterations", "32"]
    assert main(["solvers", *arguments, "--device", "cpu", "--output", str(out)]) == 0
    (one,) = json.loads((out / "solvers.json").read_text())["models"]
    assert {row["config"] for row in one["rows"]} == {
        "Picard, damping 0.8",
        "Anderson, memory 5, damping 0.8",
        "Picard 0.8, windows of 4",
    }
    assert one["penalties"] == []
    assert all(row["seconds"] > 0 and row["wall_seconds"] > 0 for row in one["rows"])
    assert (out / "solvers_run.png").read_bytes().startswith(b"\x89PNG")
    assert "Picard 0.8, windows of 4" in capsys.readouterr().out


def test_runs_of_the_same_name_get_separate_plots(trained, tmp_path):
    """For example those of two seeds, or two checkpoints of a run."""
    runs = [str(trained), str(next((trained / "checkpoints").glob("step-*")))]
    arguments = ["--tolerances", "0.1", "--sequences", "1", "--repeats", "1", "--only", "damping 0.8"]
    arguments += ["--max-iterations", "4", "--device", "cpu", "--output", str(tmp_path)]
    assert main(["solvers", "--checkpoint", *runs, *arguments]) == 0
    found = json.loads((tmp_path / "solvers.json").read_text())["models"]
    assert [one["run"] for one in found] == ["run", "run-2"]
    assert (tmp_path / "solvers_run.png").is_file()
    assert (tmp_path / "solvers_run-2.png").is_file()


@pytest.mark.slow
def test_every_configuration_is_measured_and_plotted(trained, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--checkpoint", str(trained), "--tolerances", "0.1", "1e-4", "--sequences", "2"]
    settings = ["--repeats", "1", "--penalties", "0", "0.3", "--penalty-steps", "2", "--max-iterations", "64"]
    assert main(["solvers", *arguments, *settings, "--output", str(out)]) == 0
    (one,) = json.loads((out / "solvers.json").read_text())["models"]
    rows = {(row["config"], row["scope"], row["tolerance"]): row for row in one["rows"]}
    tight = {
        way: row for (way, scope, tolerance), row in rows.items() if (scope, tolerance) == ("prefix", 1e-4)
    }
    for way in ("Picard", "Anderson, memory 5", "Broyden, memory 5", "Picard, patient"):
        assert tight[way]["iterations_mean"] >= 2
        assert rows[way, "prefix", 0.1]["calls"] <= tight[way]["calls"]
    # One call per iteration, and the final one.
    assert tight["Picard"]["calls"] == tight["Picard"]["iterations_max"] + 1
    assert tight["Picard, damping 0.5"]["calls"] > tight["Picard"]["calls"]
    # The memory of Broyden and Anderson per token, as the specs state it.
    assert tight["Broyden, memory 5"]["state_bytes"] == 12 * 16 * 4 + 14
    assert tight["Anderson, memory 5"]["state_bytes"] == 11 * 16 * 4 + 13
    # Windows and committed prefixes make no calls for finished tokens, and find the same points.
    plain = tight["Picard, damping 0.8"]
    for way in ("Picard 0.8, windows of 4", "Picard 0.8, token by token", "Picard 0.8, prefix committed"):
        if plain["converged"] == tight[way]["converged"] == 1:
            assert tight[way]["logit_error"] < 0.05
    assert tight["Picard 0.8, token by token"]["calls"] > plain["calls"]
    assert len(one["spectrum"]["radii"]) == 2 * len(one["spectrum"]["positions"])
    assert one["spectrum"]["residual_largest"] < 1e-2
    before, without, penalized = one["penalties"]
    assert (before["weight"], without["weight"], penalized["weight"]) == (None, 0.0, 0.3)
    assert penalized["step_ms"] > 0
    assert (out / "solvers_run.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "spectral radius of the maps of single tokens" in printed
    assert "penalty " in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tolerances", "0"], "tolerance must be positive and finite, got 0.0"),
        (["--penalties", "-1"], "penalty must be finite and at least 0"),
        (["--repeats", "0"], "repeats is 0; choose at least 1"),
        (["--only", "nonsense"], "no configuration name contains nonsense; available: Picard, "),
    ],
)
def test_settings_out_of_range_are_refused(trained, tmp_path, capsys, options, message):
    arguments = ["solvers", "--checkpoint", str(trained), *options, "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_windows_and_committed_prefixes_save_work_in_the_laptop_setting(tmp_path, capsys):
    """Trains S3 and compares the solvers on it: five minutes on one core."""
    options = ["--sequences", "4", "--tolerances", "1e-3", "--repeats", "1", "--length", "64"]
    assert main(["solvers", *options, "--device", "cpu", "--output", str(tmp_path)]) == 0
    (one,) = json.loads((tmp_path / "solvers.json").read_text())["models"]
    rows = {(row["config"], row["scope"]): row for row in one["rows"]}
    plain = rows["Picard, damping 0.8", "prefix"]
    assert plain["converged"] == 1
    assert plain["accuracy"] > 0.97
    assert rows["Picard", "prefix"]["work"] < plain["work"]  # damping costs where the map contracts
    assert rows["Picard 0.8, windows of 16", "prefix"]["work"] < 0.5 * plain["work"]
    assert rows["Picard 0.8, prefix committed", "prefix"]["work"] < 0.8 * plain["work"]
    assert one["spectrum"]["largest"] < 1
    assert (tmp_path / "solvers_word_problem_s3.png").stat().st_size > 10_000
