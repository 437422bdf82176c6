"""``python -m trainer.experiments duality``: a small trained run, evaluated in both modes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from implicit_blocks.registry import build as build_component
from trainer.checkpoint.load import load_checkpoint
from trainer.cli.train import main as train
from trainer.experiments.cli import main
from trainer.experiments.common.runs import evaluation_batch, find_trained_run
from trainer.experiments.duality import experiment as duality
from trainer.experiments.duality.experiment import Mode, _readable, compare, evaluate, table
from trainer.run.build import build
from trainer.specs.run import RunSpec

LENGTH = 8


def spec(**model) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {
                "kind": "implicit_lm",
                "d_model": 16,
                "n_layers": 1,
                "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
                "gradient": {"kind": "unrolled", "steps": 4},
                "at_evaluation": {
                    "solver": {"kind": "broyden"},
                    "stopping": {"tolerance": 1e-3, "max_iterations": 500},
                },
                **model,
            },
            "data": {"kind": "word_problem", "group": "Z2", "identity_probability": 0.5, "seq_len": LENGTH},
            "training": {
                "max_steps": 30,
                "batch_size": 16,
                "optimizer": {"kind": "adamw", "learning_rate": 5e-3},
                "schedule": {"kind": "warmup_linear"},
                "threads": 1,
            },
            "evaluation": {"sequences": 4, "batch_size": 4, "last_tokens": 4},
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("duality") / "run"
    build(spec(), output=folder, device="cpu").train()
    return folder


def test_both_modes_agree_within_the_tolerance(trained, tmp_path, capsys):
    arguments = ["--checkpoint", str(trained), "--tolerances", "1e-9", "1e-2", "--sequences", "2", "--double"]
    assert main(["duality", *arguments, "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out/duality.json").read_text())
    loose, tight = written["tolerances"]
    assert (loose["tolerance"], tight["tolerance"]) == (1e-2, 1e-9)
    assert tight["tokens"] == 2 * LENGTH
    assert tight["sequential"]["converged"] == tight["simultaneous"]["converged"] == 1.0
    assert tight["logit_distance_max"] < 1e-5 * max(1.0, loose["logit_distance_max"])
    assert tight["equal_tokens"] == 1.0
    assert tight["equal_clear_tokens"] == 1.0
    assert tight["simultaneous"]["equal_to_tightest"] == 1.0
    assert tight["simultaneous"]["distance_to_tightest_mean"] == 0.0
    assert tight["sequential"]["distance_to_tightest_mean"] == tight["logit_distance_mean"]
    assert loose["simultaneous"]["distance_to_tightest_mean"] > 0
    for mode in ("sequential", "simultaneous"):
        figures = tight[mode]
        assert sum(figures["iterations_histogram"]) == 2 * LENGTH
        assert len(figures["iterations_histogram"]) == figures["iterations_max"] + 1
        assert len(figures["iterations_by_position"]) == LENGTH
        assert figures["iterations_mean"] > loose[mode]["iterations_mean"]
    kinds = written["by_token"]
    assert {one["token"] for one in kinds} == {0, 1}
    assert sum(one["count"] for one in kinds) == 2 * LENGTH
    assert sum(one["count"] * one["iterations_mean"] for one in kinds) == pytest.approx(
        2 * LENGTH * tight["sequential"]["iterations_mean"]
    )
    assert kinds[0]["iterations_mean"] >= kinds[1]["iterations_mean"]
    assert (tmp_path / "out/duality.png").read_bytes().startswith(b"\x89PNG")
    assert "equal tokens" in capsys.readouterr().out


def test_the_error_of_equal_tokens_is_over_sequences():
    logits = torch.zeros(4, 2, 3)
    logits[:, :, 0] = 1.0
    other = logits.clone()
    other[0, :, 1] = 2.0  # both tokens of the first sequence, none of the others
    modes = {
        name: Mode(
            logits=one, iterations=torch.ones(4, 2).long(), converged=torch.ones(4, 2).bool(), seconds=0.0
        )
        for name, one in (("simultaneous", logits), ("sequential", other))
    }
    row = compare(modes, torch.zeros(4, 2).long(), tolerance=0.1, tightest=modes["simultaneous"])
    assert row["equal_tokens"] == 0.75
    assert row["equal_tokens_error"] == pytest.approx(0.5 / 2)  # the shares 0, 1, 1, 1
    assert (row["simultaneous"]["equal_to_tightest"], row["sequential"]["equal_to_tightest"]) == (1.0, 0.75)
    assert "75.00% ±25.00" in table([row])
    assert "WARNING" not in table([row])
    open_ = {name: replace(mode, converged=torch.tensor([[True, False]] * 4)) for name, mode in modes.items()}
    row = compare({**open_, "sequential": modes["sequential"]}, torch.zeros(4, 2).long(), tolerance=0.1)
    warning = "50.00% of the tokens converged in simultaneous and 100.00% in sequential"
    assert warning in table([row])
    one = {name: replace(mode, logits=mode.logits[:1]) for name, mode in modes.items()}
    assert compare(one, torch.zeros(1, 2).long(), tolerance=0.1)["equal_tokens_error"] is None


def test_clear_tokens_exceed_twice_the_largest_distance():
    margins, distance = torch.tensor([0.9, 1.5, 1.9, 2.1]), 1.0
    logits = torch.zeros(1, 4, 3)
    logits[0, :, 0] = margins
    other = logits.clone()
    other[0, 0, 2] = distance  # of one token, but it counts for all
    modes = {
        name: Mode(logits=one, iterations=torch.ones(1, 4), converged=torch.ones(1, 4), seconds=0.0)
        for name, one in (("simultaneous", logits), ("sequential", other))
    }
    modes = {name: replace(mode, iterations=mode.iterations.long()) for name, mode in modes.items()}
    row = compare(modes, torch.zeros(1, 4).long(), tolerance=0.1)
    assert (row["clear_tokens"], row["equal_tokens"], row["equal_clear_tokens"]) == (0.25, 0.75, 1.0)


def test_a_mode_leaves_the_model_as_it_was(trained):
    _, run, weights = find_trained_run(trained)
    model = build_component(run.model)
    load_checkpoint(weights, model=model)
    before = model.spec
    batch = evaluation_batch(run, sequences=1, length=4)
    for scope in (None, "sequence"):
        evaluate(model.eval(), batch, mode="sequential", tolerance=0.1, max_iterations=8, scope=scope)
        assert model.spec == before


def test_windows_of_the_models_evaluation_are_disabled(trained, tmp_path, monkeypatch):
    class SeenError(Exception):
        pass

    def seen(model, *given, **more):
        raise SeenError(model.spec.at_evaluation.window_length, model.spec.at_evaluation.commit_prefix)

    monkeypatch.setattr(duality, "evaluate", seen)
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run/spec.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["model"]["at_evaluation"]["window_length"] = 4
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(SeenError) as caught:
        duality.run(tmp_path / "out", tmp_path / "run", tolerances=[0.1], device="cpu")
    assert caught.value.args == (None, None)


def test_a_checkpoint_is_evaluated_at_another_length(trained, tmp_path):
    (checkpoint,) = (trained / "checkpoints").iterdir()
    arguments = ["--checkpoint", str(checkpoint), "--tolerances", "0.1", "--sequences", "2", "--length", "12"]
    assert main(["duality", *arguments, "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/duality.json").read_text())["settings"]["length"] == 12


def test_a_whole_row_may_end_the_search(trained, tmp_path):
    arguments = ["duality", "--checkpoint", str(trained), "--sequences", "2", "--double"]
    both = ["--tolerances", "0.05", "1e-9", "--scope", "sequence", "--output", str(tmp_path / "out")]
    assert main([*arguments, *both]) == 0
    written = json.loads((tmp_path / "out/duality.json").read_text())
    assert written["settings"]["scope"] == "sequence"
    loose, tight = written["tolerances"]
    assert tight["equal_tokens"] == 1.0  # the same point, however the search ends
    assert sum(count > 0 for count in loose["simultaneous"]["iterations_histogram"]) <= 2  # one number a row
    by_position = loose["simultaneous"]["iterations_by_position"]
    assert min(by_position) == max(by_position)
    assert len(set(loose["sequential"]["iterations_by_position"])) > 1  # a token's own, in turn
    prefix = ["--tolerances", "0.05", "--scope", "prefix", "--output", str(tmp_path / "prefix")]
    assert main([*arguments, *prefix]) == 0
    token = json.loads((tmp_path / "prefix/duality.json").read_text())["tolerances"][0]
    assert len(set(token["simultaneous"]["iterations_by_position"])) > 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("odd", "odd"),
        ("\u0120the", "\u2423the"),
        ("\u00e2\u0122\u0136", "\u2014"),
        ("\u010a", "\u21b5"),
        ("\u00e2", "\u00e2"),
    ],
    ids=["letters", "blank", "dash", "line", "part of a character"],
)
def test_tokens_of_bytes_are_shown_as_text(text, shown):
    pytest.importorskip("tokenizers", reason="their own decoder of bytes")
    assert _readable(text) == shown


def test_tokens_are_named_by_a_tokenizer(trained, tmp_path, capsys):
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(json.dumps({"model": {"vocab": {"\u0120even": 0, "odd": 1}}}), encoding="utf-8")
    arguments = ["duality", "--checkpoint", str(trained), "--tolerances", "0.1"]
    arguments += ["--sequences", "2", "--max-iterations", "20", "--tokenizer", str(vocabulary)]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out/duality.json").read_text())
    assert {one["text"] for one in written["by_token"]} == {"\u2423even", "odd"}
    vocabulary.write_text(json.dumps({"model": {"vocab": {"even": 0, "another": 2}}}))
    assert main([*arguments, "--output", str(tmp_path / "other")]) == 2
    assert (
        "has token 2, but the model's vocabulary is 2; use the tokenizer of its data"
        in capsys.readouterr().err
    )
    vocabulary.write_text("[]")
    assert main([*arguments, "--output", str(tmp_path / "other")]) == 2
    assert "is not a tokenizer.json with a vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tolerances", "-1"], "tolerance must be positive and finite, got -1.0"),
        (["--damping", "1.5"], "damping is 1.5; choose a number in (0, 1]"),
        (["--damping", "0.5"], "solver 'broyden' has no damping; leave it out or choose another solver"),
        (["--sequences", "0"], "sequences is 0; choose at least 1"),
        (["--length", "0"], "length is 0; choose at least 1"),
        (["--device", "nonsense"], "device 'nonsense' is not a device's name"),
    ],
)
def test_settings_out_of_range_are_refused(trained, tmp_path, capsys, options, message):
    arguments = ["duality", "--checkpoint", str(trained), *options, "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_without_an_implicit_model_are_rejected(tmp_path, capsys):
    assert main(["duality", "--checkpoint", str(tmp_path / "none")]) == 2
    assert "is neither a run nor a checkpoint of one" in capsys.readouterr().err
    explicit = spec().model_dump(mode="json", exclude_defaults=False)
    explicit["model"] = {
        "kind": "explicit_lm",
        "vocab_size": 2,
        "d_model": 16,
        "n_layers": 1,
        "mixer": explicit["model"]["mixer"],
    }
    explicit["training"]["max_steps"] = 1
    build(RunSpec.model_validate(explicit), output=tmp_path / "explicit", device="cpu").train()
    assert main(["duality", "--checkpoint", str(tmp_path / "explicit")]) == 2
    assert "is of kind 'explicit_lm', which has no fixed point" in capsys.readouterr().err


@pytest.mark.slow
def test_modes_of_a_laptop_run_agree_at_tight_tolerances(tmp_path):
    """Trains S3 for 150 steps with the settings of the page: two minutes on one core."""
    run = tmp_path / "s3"
    options = ["--spec", "word_problem_s3", "training.max_steps=150", "--device", "cpu"]
    assert train([*options, "--output", str(run)]) == 0
    options = ["--sequences", "8", "--tolerances", "0.05", "1e-3", "1e-5", "--device", "cpu"]
    out = tmp_path / "out"
    assert main(["duality", "--checkpoint", str(run), *options, "--output", str(out)]) == 0
    loose, *_, tight = json.loads((out / "duality.json").read_text())["tolerances"]
    assert (loose["tolerance"], tight["tolerance"]) == (0.05, 1e-5)
    assert tight["equal_clear_tokens"] == 1.0
    assert tight["equal_tokens"] > 0.99
    assert loose["equal_tokens"] > 0.5
    for mode in ("sequential", "simultaneous"):
        assert tight[mode]["converged"] > 0.9
    assert (out / "duality.png").stat().st_size > 10_000
