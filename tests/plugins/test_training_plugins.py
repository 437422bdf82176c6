"""Third-party components of the trainer, installed from a wheel, in training and evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import implicit_blocks as ib

RUN = """
extends: word_problem_s3
model: {d_model: 16, mixer: {d_state: 8, head_dim: 8}, stopping: {max_iterations: 4},
        at_evaluation: {stopping: {max_iterations: 8}}}
data: {kind: acme.parity, seq_len: 12}
training:
  max_steps: 6
  batch_size: 4
  checkpoint_every: 2
  optimizer: {kind: acme.sign, learning_rate: 1e-3}
  schedule: {kind: acme.halving, every: 4}
phases: [{name: bounded, until: 3, model: {gradient: {steps: 1}}}, {name: free}]
evaluation: {lengths: [12], identity_probabilities: [], sequences: 4, batch_size: 4}
callbacks: [{kind: acme.diary}]
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_third_party_components_trains_and_resumes(run, spec_file):
    folder = spec_file.with_name("whole")
    done = run("-m", "trainer", "--spec", "run.yaml", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    assert [row["learning_rate"] for row in rows(folder)] == [1e-3] * 4 + [5e-4] * 2
    assert (folder / "diary.txt").read_text().splitlines() == [
        "start 0 0", "phase 0 bounded", "step 1", "step 2", "save 2", "step 3", "phase 3 free",
        "step 4", "save 4", "step 5", "step 6", "save 6", "evaluation 6 parity", "end 6 True",
    ]  # fmt: skip

    halves = spec_file.with_name("halves")
    done = run("-m", "trainer", "--spec", "run.yaml", "--output", str(halves), "--stop-at", "4")
    assert done.returncode == 0, done.stderr
    done = run("-m", "trainer", "--resume", "--output", str(halves))
    assert done.returncode == 0, done.stderr
    for kept in ("loss", "gradient_norm", "learning_rate"):
        assert [row[kept] for row in rows(halves)] == [row[kept] for row in rows(folder)]
    assert (halves / "diary.txt").read_text().splitlines()[9:13] == [
        "end 4 False", "start 4 9", "phase 4 free", "step 5",
    ]  # fmt: skip


DRY_RUNS = """
import contextlib, io, json, sys
from trainer.cli.train import main

found = []
for change in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        code = main(["--spec", "run.yaml", "--dry-run", change])
    found.append((code, shown.getvalue()))
print(json.dumps(found))
"""
"""Runs ``python -m trainer`` with each change, in one process."""


def test_third_party_specs_are_validated(run, spec_file):
    messages = {
        "data.period=0": "data.period: should be greater than 0; got 0",
        "training.schedule.every=9": "training.schedule: a run of 6 steps never halves its rate",
        "callbacks.0.kind=acme.dairy": "unknown callback 'acme.dairy'; did you mean 'acme.diary'?",
        "training.optimizer.btea=0.5": "unknown key 'btea'; did you mean 'beta'?",
    }
    done = run("-c", DRY_RUNS, *messages)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for (code, shown), message in zip(found, messages.values(), strict=True):
        assert code == 2, shown
        assert message in shown
        assert "Traceback" not in shown


def test_a_failing_callback_is_named_and_the_run_can_be_resumed(run, spec_file):
    folder = spec_file.with_name("output")
    fragile = "callbacks=[{kind: acme.fragile, after: 2}, {kind: acme.diary}]"
    done = run("-m", "trainer", "--spec", "run.yaml", "--output", str(folder), fragile)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    expected = (
        "callback 'acme.fragile' of acme-training 1.4.0 failed in on_step: RuntimeError: the line is dead; "
        "fix it, remove it from `callbacks`, or set its `required: false` to continue without it"
    )
    assert expected in done.stderr
    assert f"the last checkpoint, {folder}/checkpoints/step-00000003, is intact" in done.stderr
    assert (folder / "diary.txt").read_text().splitlines()[-2:] == ["step 3", "save 3"]

    without = "callbacks=[{kind: acme.fragile, required: false}, {kind: acme.diary}]"
    spec = str(folder / "spec.yaml")
    done = run("-m", "trainer", "--spec", spec, "--resume", "--output", str(folder), without)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING: callback 'acme.fragile' of acme-training 1.4.0 failed") == 1
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_third_party_evaluation_task_runs(run, tmp_path, tokenizer_file):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    model = {"d_model": 16, "n_layers": 1, "mixer": {"kind": "attention", "n_heads": 2}, "vocab_size": 300}
    spec = {"extends": "word_problem_s3", "model": model}
    (tmp_path / "model.yaml").write_text(json.dumps(spec))  # JSON is YAML
    built = ib.build(ib.load_spec(tmp_path / "model.yaml").model)
    save_file(built.state_dict(), tmp_path / "model.safetensors")
    verses = [("the cat sat on the", "mat"), ("and the dog, on the", "log"), ("the water of the", "sun")]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "verses.jsonl").write_text(
        "".join(json.dumps({"verse": verse, "word": word}) + "\n" for verse, word in verses)
    )
    command = ["-m", "trainer.evaluate", "--checkpoint", "model.safetensors", "--spec", "model.yaml"]
    command += ["--tokenizer", str(tokenizer_file), "--data", "data", "--device", "cpu", "--max-length", "64"]
    done = run(*command, "--tasks", "acme.rhyme", "--output", "out", warnings="default")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert 0 <= result["columns"]["rhymes"] <= 1
    assert result["tasks"]["acme.rhyme"]["search"]["iterations"] >= 1
