"""``python -m trainer.evaluate`` of models whose search does not end at a tolerance."""

from __future__ import annotations

import pytest

from tests.trainer.evaluation.evaluations import evaluate, results
from trainer.evaluation.eval_model import find_eval_model
from trainer.run.build import build


@pytest.mark.parametrize("loops", [1, 3])
def test_models_with_a_fixed_number_of_loops_are_evaluated_with_others(run_folder, tmp_path, loops):
    """By --self-iterations or by an override of the spec, with the same result."""
    spec = "model.at_evaluation.exit={kind: fixed, loops: %d}"
    common = ["--checkpoint", run_folder, "--tasks", "--tokens", tmp_path / "text.bin", "--limit", 2,
              "--lengths", 16, "--device", "cpu"]  # fmt: skip
    assert evaluate(spec % loops, *common, "--output", tmp_path / "override") == 0
    assert evaluate(spec % 2, *common, "--self-iterations", loops, "--output", tmp_path / "option") == 0
    (one,), (other,) = (results(tmp_path / name)["lengths"] for name in ("override", "option"))
    assert one["iterations_max"] == other["iterations_max"] == loops
    assert one["perplexity"] == other["perplexity"]
    assert results(tmp_path / "override")["settings"]["overrides"] == [spec % loops]


@pytest.mark.parametrize(
    ("exit", "option", "message"),
    [
        (
            "fixed, loops: 2",
            ["--mean-iterations", 2],
            "by exit 'fixed', not at a tolerance; omit --mean-iterat",
        ),
        (
            "kl",
            ["--mean-iterations", 2],
            "ends its search by exit 'kl', not at a tolerance; omit --mean-iterat",
        ),
        (
            "kl",
            ["--tolerance", 0.1],
            "ends its search by exit 'kl', not at a tolerance; omit --tolerance, or",
        ),
    ],
    ids=["mean of fixed", "mean of kl", "tolerance of kl"],
)
def test_tolerances_are_refused_where_another_exit_ends_the_search(
    run_folder, tmp_path, refused, exit, option, message
):
    changed = f"model.at_evaluation.exit={{kind: {exit}}}"
    common = ["--checkpoint", run_folder, "--tasks", "--tokens", tmp_path / "text.bin"]
    assert message in refused(changed, *common, *option)


def test_the_first_tolerance_of_a_mean_number_of_iterations_may_be_given(run_folder, tmp_path):
    code = evaluate(
        "--checkpoint", run_folder, "--tasks", "--tokens", tmp_path / "text.bin", "--limit", 2,
        "--lengths", 16, "--mean-iterations", 2, "--tolerance", 1e-3, "--output", tmp_path / "out",
        "--device", "cpu",
    )  # fmt: skip
    assert code == 0


def test_models_with_one_state_per_loop_have_self_iterations_on_tokens_alone(
    run_folder, tmp_path, benchmarks, refused
):
    def per_loop(loops):
        fixed = f"{{kind: fixed, loops: {loops}}}"
        return [f"model.at_evaluation.exit={fixed}", f"model.depth={fixed}", "model.state_policy=per_loop",
                "model.gradient={kind: last_loops}"]  # fmt: skip

    common = ["--checkpoint", run_folder, "--tokens", tmp_path / "text.bin", "--limit", 2, "--lengths", 16]
    common += ["--device", "cpu"]
    assert evaluate(*per_loop(3), *common, "--output", tmp_path / "override") == 0
    assert evaluate(*per_loop(2), *common, "--self-iterations", 3, "--output", tmp_path / "option") == 0
    (one,), (other,) = (results(tmp_path / name)["lengths"] for name in ("override", "option"))
    assert one["iterations_max"] == other["iterations_max"] == 3
    assert one["perplexity"] == other["perplexity"]
    message = refused(*per_loop(2), *common, "--data", benchmarks, "--tasks", "piqa", "--self-iterations", 3)
    assert "model.at_evaluation.exit.loops=N" in message


def test_an_override_after_an_option_is_refused_with_its_place(run_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        evaluate("--checkpoint", run_folder, "--lengths", 16, "evaluation.sequences=2")
    assert "'evaluation.sequences=2'; overrides" in capsys.readouterr().err


def test_a_run_s_model_is_that_of_its_last_phase(small, tmp_path):
    last = {"name": "last", "model": {"at_evaluation": {"stopping": {"max_iterations": 7}}}}
    spec = small({"phases": [{"name": "first", "until": 1}, last], "training.max_steps": 2})
    run = build(spec, output=tmp_path / "run", device="cpu")
    run.train()
    model = find_eval_model(tmp_path / "run").load()
    assert model.evaluation_stopping.max_iterations == run.model.evaluation_stopping.max_iterations == 7
    change = "model.at_evaluation.stopping.max_iterations=3"
    with pytest.raises(ValueError, match=r"max_iterations=3 changes nothing, .* phases\.last\.model"):
        find_eval_model(tmp_path / "run", overrides=[change])
    changed = find_eval_model(tmp_path / "run", overrides=[f"phases.last.{change}"]).load()
    assert changed.evaluation_stopping.max_iterations == 3
