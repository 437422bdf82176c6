"""Whole runs of a tiny model: files, exact resume, phases, stops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.load import read_model_tensors
from trainer.errors import CheckpointError, NonFiniteLossError, RunFolderError
from trainer.reporting.metrics import read_metrics
from trainer.reporting.report import read_run
from trainer.run.build import build, draw
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder

Small = Callable[..., RunSpec]

CURRICULUM: dict[str, Any] = {
    "training.max_steps": 12,
    "training.checkpoint_every": 3,
    "training.evaluate_every": 4,
    "training.optimizer.weight_decay": 0.1,
    "model.dropout": 0.1,  # draws from torch's generator at every step
    "phases": [
        {
            "name": "unrolled",
            "until": 0.4,
            "model": {"gradient": {"kind": "unrolled", "steps": 3}},
            "training": {"optimizer": {"learning_rate": 4e-3}},
        },
        {"name": "free", "training": {"max_grad_norm": 0.1}},
    ],
}


def losses(folder: Path) -> list[tuple[Any, ...]]:
    kept = ("step", "phase", "loss", "gradient_norm", "learning_rate", "iterations", "residual", "accuracy")
    return [tuple(row[key] for key in kept) for row in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_model_tensors(list_checkpoints(folder / "checkpoints")[-1])


@pytest.fixture(scope="module")
def whole(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder: Path = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer.run.build.draw", draw)  # other tests of this module do without the picture
        build(small(CURRICULUM), name="whole", output=folder, device="cpu").train()
    return folder


def test_a_run_writes_all_its_files(whole: Path, small: Small) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {
        "spec.yaml", "manifest.json", "metrics.jsonl", "evaluations.jsonl", "checkpoints", "summary.json",
        "report.png", ".lock",
    }  # fmt: skip
    rows = list(read_metrics(whole / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert {row["phase"] for row in rows[:5]} == {"unrolled"}
    assert {row["phase"] for row in rows[5:]} == {"free"}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert [row["tokens"] for row in rows] == [8 * 12 * step for step in range(1, 13)]
    # The unrolled phase takes all its steps; the search after it stops at its tolerance or maximum.
    assert {row["iterations_max"] for row in rows[:5]} == {3}

    evaluations = list(read_metrics(whole / "evaluations.jsonl"))
    assert [row["step"] for row in evaluations] == [4, 4, 8, 8, 12, 12]
    assert {row["set"] for row in evaluations} == {"p0.5_L12", "p0.5_L16"}

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["chance"] == pytest.approx(1 / 6)
    assert summary["saving"]["checkpoints"] == len(summary["saving"]["seconds"]) == 4
    weights_and_moments = 3 * 4 * summary["parameters"]
    assert summary["saving"]["gb"] * 1e9 == pytest.approx(weights_and_moments, rel=0.1)
    assert summary["phases"][0]["changes"][-1] == "training.optimizer.learning_rate: 0.002 → 0.004"
    longest = summary["evaluation"][1]
    assert len(longest["accuracy_by_position"]) == len(longest["iterations_by_position"]) == 16
    # Each accuracy has the convergence of its searches beside it.
    assert {"accuracy_last", "residual", "residual_max", "non_converged", "iterations"} <= longest.keys()
    assert (whole / "report.png").stat().st_size > 10_000

    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__.split("+")[0] or manifest["versions"]["torch"]
    assert manifest["seed"] == 0

    from implicit_blocks.specs import load_spec

    assert load_spec(whole / "spec.yaml") == small(CURRICULUM)


@pytest.mark.parametrize("stop_at", [3, 5, 7])
def test_a_resumed_run_equals_the_whole_bit_by_bit(
    whole: Path, small: Small, tmp_path: Path, stop_at: int
) -> None:
    folder = tmp_path / "run"
    first = build(small(CURRICULUM), output=folder, device="cpu")
    assert first.train(stop_at=stop_at) is None
    assert not (folder / "summary.json").exists()
    torch.rand(7)  # whatever happened in between
    summary = build(small(CURRICULUM), output=folder, device="cpu", resume=True).train()
    assert summary is not None
    assert losses(folder) == losses(whole)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(folder)[name]), name
    assert [row["step"] for row in read_metrics(folder / "evaluations.jsonl")] == [4, 4, 8, 8, 12, 12]
    seconds = [row["seconds"] for row in read_metrics(folder / "metrics.jsonl")]
    assert seconds == sorted(seconds)  # earlier starts count


def test_a_killed_run_resumes_from_its_last_checkpoint(
    whole: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run = build(small(CURRICULUM), output=folder, device="cpu")
    steps = 0

    class KilledError(BaseException):
        pass

    def dying(row: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 8:
            raise KilledError

    monkeypatch.setattr(run.display, "step", dying)
    with pytest.raises(KilledError):
        run.train()
    # Steps 7 and 8 were logged but not saved: they are repeated, and the file has each of them once.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    build(small(CURRICULUM), output=folder, device="cpu", resume=True).train()
    assert losses(folder) == losses(whole)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_loaded(
    whole: Path, small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    build(small(CURRICULUM), output=folder, device="cpu").train(stop_at=7)
    damaged = folder / "checkpoints" / "step-00000007"
    content = (damaged / "__0_0.distcp").read_bytes()
    (damaged / "__0_0.distcp").write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=r"step-00000007: __0_0\.distcp is truncated"):
        build(small(CURRICULUM), output=folder, device="cpu", checkpoint="step-00000007")
    capsys.readouterr()
    build(small(CURRICULUM), output=folder, device="cpu", resume=True).train()
    shown = capsys.readouterr().out
    assert "WARNING: checkpoint" in shown
    assert "__0_0.distcp is truncated" in shown
    assert "resuming from step-00000006" in shown
    assert losses(folder) == losses(whole)
    assert (folder / "checkpoints" / "left-step-00000007").is_dir()


def test_an_earlier_checkpoint_can_be_chosen_by_name(whole: Path, small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    build(small(CURRICULUM), output=folder, device="cpu").train(stop_at=7)
    with pytest.raises(
        CheckpointError, match="no checkpoint 'step-00000002'; available: step-00000006, step-00000007"
    ):
        build(small(CURRICULUM), output=folder, device="cpu", checkpoint="step-00000002")
    build(small(CURRICULUM), output=folder, device="cpu", resume=True).train(stop_at=8)
    run = build(small(CURRICULUM), output=folder, device="cpu", checkpoint="7")
    assert run.loop.progress.step == 7
    run.train()
    assert losses(folder) == losses(whole)
    assert [row["step"] for row in read_metrics(folder / "evaluations.jsonl")] == [4, 4, 8, 8, 12, 12]


def test_micro_batches_do_not_change_the_run(small: Small, tmp_path: Path) -> None:
    without_dropout = {**CURRICULUM, "model.dropout": 0.0, "training.max_steps": 5}
    one, cut = tmp_path / "one", tmp_path / "cut"
    build(small(without_dropout), output=one, device="cpu").train()
    build(small({**without_dropout, "training.micro_batch_size": 2}), output=cut, device="cpu").train()
    for row, other in zip(losses(one), losses(cut), strict=True):
        assert other[2:] == pytest.approx(row[2:], rel=2e-3)
        assert other[2] == pytest.approx(row[2], rel=1e-5)


def test_bfloat16_trains(small: Small, tmp_path: Path) -> None:
    summary = build(small({"training.precision": "bfloat16"}), output=tmp_path / "run", device="cpu").train()
    assert summary is not None
    assert summary["final"]["loss"] < 3


def test_the_seed_determines_weights_and_data(small: Small, tmp_path: Path) -> None:
    found = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        spec = small({"training.seed": seed, "training.max_steps": 1})
        build(spec, output=tmp_path / name, device="cpu").train()
        found[name] = losses(tmp_path / name)
    assert found["a"] == found["b"] != found["c"]


def test_a_nan_loss_stops_the_run_before_the_update(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    # No loader thread: it would request batches before their step.
    run = build(small({**CURRICULUM, "training.loader_threads": 0}), output=folder, device="cpu")
    batch, forward = run.loop.active.data.batch, run.model.forward
    asked = 0

    def counting(position: int, count: int) -> Any:
        nonlocal asked
        asked += 1
        return batch(position, count)

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if asked == 5 and run.model.training:
            output.loss.data.fill_(float("nan"))
        return output

    monkeypatch.setattr(run.loop.active.data, "batch", counting)
    monkeypatch.setattr(run.model, "forward", poisoned)
    with pytest.raises(
        NonFiniteLossError, match=r"loss is nan at step 5 \(phase 'unrolled', samples 32 to 39\)"
    ):
        run.train()
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    assert run.loop.last_checkpoint == folder / "checkpoints" / "step-00000003"
    # Without the cause of the failure the run resumes.
    assert build(small(CURRICULUM), output=folder, device="cpu", resume=True).train() is not None


def test_an_infinite_gradient_stops_the_run(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(small(), output=tmp_path / "run", device="cpu")
    weight = next(run.model.parameters())
    weight.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(NonFiniteLossError, match=r"the gradient norm is (nan|inf) at step 1"):
        run.train()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_a_folder_with_a_run_is_refused(whole: Path, small: Small) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="already holds a run; continue it by --resume"):
        build(small(CURRICULUM), output=whole, device="cpu")
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_run_of_another_model_is_not_resumed(whole: Path, small: Small) -> None:
    spec = small({**CURRICULUM, "model.d_model": 32, "model.stopping.tolerance": 0.1})
    with pytest.raises(RunFolderError, match=r"d_model: 16 → 32\)") as refusal:
        build(spec, output=whole, device="cpu", resume=True)
    assert "start a new run in another folder" in str(refusal.value)
    assert "tolerance" not in str(refusal.value), "that much could change"


def test_backends_are_recorded_and_may_change_on_resume(whole: Path, small: Small, tmp_path: Path) -> None:
    ran = json.loads((whole / "manifest.json").read_text())["backends"]
    assert ran["ssd"]["torch"] == "ran"
    assert ran["ssd"]["mamba-ssm"].startswith("untested: ")
    shutil.copytree(whole, tmp_path / "run")
    changed = small({**CURRICULUM, "model.mixer.backend": "torch"})
    assert build(changed, output=tmp_path / "run", device="cpu", resume=True).train() is not None
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["resumed"][-1]["backends"] == manifest["backends"] == ran


def test_a_backend_that_is_missing_is_refused_before_the_folder_is_made(small: Small, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"backend 'mamba-ssm': .*install"):
        build(small({"model.mixer.backend": "mamba-ssm"}), output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_search_may_change_on_resume_and_is_logged(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert build(small(), output=folder, device="cpu").train(stop_at=2) is None
    other = small(
        {
            "model.solver": {"kind": "anderson", "memory": 3},
            "model.gradient.steps": 2,
            "model.stopping.max_iterations": 6,
            "model.at_evaluation.stopping.tolerance": 0.01,
        }
    )
    run = build(other, output=folder, device="cpu", resume=True)
    message = capsys.readouterr().out
    for change in (
        "model.solver.kind: 'picard' → 'anderson'",
        "model.gradient.steps: 1 → 2",
        "model.stopping.max_iterations: 4 → 6",
        "model.at_evaluation.stopping.tolerance: None → 0.01",
    ):
        assert f"changed since the start: {change}" in message
    assert run.train() is not None
    iterations = [row["iterations_max"] for row in read_metrics(folder / "metrics.jsonl")]
    assert len(iterations) == 4
    assert max(iterations[2:]) > 4


def test_other_settings_may_change_on_resume_and_are_logged(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    build(small(), output=folder, device="cpu").train()
    longer = small({"training.max_steps": 6})
    run = build(longer, output=folder, device="cpu", resume=True)
    assert "changed since the start: training.max_steps: 4 → 6" in capsys.readouterr().out
    run.train()
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert (folder / "spec.until-step-00000004.yaml").is_file()
    assert json.loads((folder / "manifest.json").read_text())["resumed"][0]["step"] == 4
    with pytest.raises(RunFolderError, match=r"at step 6, but the spec ends the run at step 4; .*"):
        build(small(), output=folder, device="cpu", resume=True)


def test_another_batch_size_on_resume_warns_of_the_new_token_budget(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    tokens = {"training.max_steps": None, "training.max_tokens": 6 * 96}  # 6 steps of 8 x 12
    build(small(tokens), output=folder, device="cpu").train(stop_at=2)
    build(small(tokens), output=folder, device="cpu", resume=True).train(stop_at=3)
    assert "WARNING" not in capsys.readouterr().out
    run = build(small({**tokens, "training.batch_size": 12}), output=folder, device="cpu", resume=True)
    message = capsys.readouterr().out
    assert "the run has seen 288 tokens instead of 432" in message
    assert "now ends after 432 tokens instead of 576" in message
    run.folder.release()
    phases = [{"name": "first", "until": 3}, {"name": "rest", "training": {"batch_size": 12}}]
    run = build(small({**tokens, "phases": phases}), output=folder, device="cpu", resume=True)
    assert "WARNING" not in capsys.readouterr().out
    run.train()
    assert [row["tokens"] for row in read_metrics(folder / "metrics.jsonl")] == [96, 192, 288, 432, 576]


def test_a_finished_run_is_only_evaluated_again(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    last = {"name": "last", "model": {"at_evaluation": {"stopping": {"max_iterations": 9}}}}
    spec = small({"training.evaluate_every": 2, "phases": [{"name": "first", "until": 2}, last]})
    first = build(spec, output=folder, device="cpu").train()
    again = build(spec, output=folder, device="cpu", resume=True).train()
    evaluated = [(row["step"], row["length"]) for row in read_metrics(folder / "evaluations.jsonl")]
    assert evaluated == [(2, 12), (2, 16), (4, 12), (4, 16)]  # once, though made twice
    assert first is not None
    assert again is not None
    assert again["steps"] == 4
    assert again["final"] == first["final"]
    for row, other in zip(first["evaluation"], again["evaluation"], strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


def test_a_change_of_a_finished_run_is_refused_or_does_not_change_its_spec(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    build(small(), output=folder, device="cpu").train()
    kept = ("spec.yaml", "summary.json", "manifest.json", "evaluations.jsonl")
    before = {name: (folder / name).read_bytes() for name in kept}
    for change in ({"training.optimizer.learning_rate": 1.0}, {"training.seed": 3}):
        with pytest.raises(RunFolderError, match=r"is finished, so these changes would train nothing: trai"):
            build(small(change), output=folder, device="cpu", resume=True)
    assert {name: (folder / name).read_bytes() for name in kept} == before
    again = build(small({"evaluation.lengths": [20]}), output=folder, device="cpu", resume=True).train()
    assert again is not None
    assert [row["length"] for row in again["evaluation"]] == [20]
    assert "spec.yaml keeps the spec of its training" in capsys.readouterr().out
    assert (folder / "spec.yaml").read_bytes() == before["spec.yaml"]
    assert not list(folder.glob("spec.until-*"))
    (resumed,) = json.loads((folder / "manifest.json").read_text())["resumed"]
    assert resumed["changes"] == ["evaluation.lengths: [12, 16] → [20]"]


def test_a_resumed_run_may_end_at_its_checkpoint(small: Small, tmp_path: Path) -> None:
    """An earlier end changes the spec, and no step remains to be trained."""
    folder = tmp_path / "run"
    assert build(small({"training.max_steps": 9}), output=folder, device="cpu").train(stop_at=4) is None
    assert build(small(), output=folder, device="cpu", resume=True).train() is not None
    assert "max_steps: 4" in (folder / "spec.yaml").read_text()
    assert (folder / "spec.until-step-00000004.yaml").is_file()


def test_the_summary_of_a_continued_run_is_renamed(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    build(small(), output=folder, device="cpu").train()
    longer = small({"training.max_steps": 6})
    assert build(longer, output=folder, device="cpu", resume=True).train(stop_at=5) is None
    with pytest.raises(RunFolderError, match=r"contains no finished run \(summary\.json is missing\)"):
        read_run(folder)
    assert json.loads((folder / "summary.until-step-00000004.json").read_text())["steps"] == 4
    assert build(longer, output=folder, device="cpu", resume=True).train() is not None
    assert read_run(folder).summary["steps"] == 6


def test_a_missing_evaluation_uses_the_phase_that_ended(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    last = {"name": "last", "model": {"at_evaluation": {"stopping": {"max_iterations": 9}}}}
    spec = small({"training.evaluate_every": 2, "phases": [{"name": "first", "until": 2}, last]})
    build(spec, output=folder, device="cpu").train(stop_at=2)
    before = list(read_metrics(folder / "evaluations.jsonl"))
    (folder / "evaluations.jsonl").write_text("")  # as where a signal cut it short
    build(spec, output=folder, device="cpu", resume=True).train(stop_at=3)
    again = list(read_metrics(folder / "evaluations.jsonl"))
    assert [row["iterations_max"] for row in before] == [6, 6]
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in before]


def test_each_phase_sets_activation_checkpointing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"name": "first", "until": 1, "training": {"checkpoint_activations": "layers"}}
    run = build(small({"phases": [first, {"name": "last"}]}), output=tmp_path / "run", device="cpu")
    asked: list[str] = []
    monkeypatch.setattr(run.model, "checkpoint_activations", asked.append)
    run.train(stop_at=3)
    assert asked == ["layers", "none"]


def test_the_spec_sets_how_many_checkpoints_are_kept(small: Small, tmp_path: Path) -> None:
    keeping = {"training.keep_checkpoints": 1, "training.keep_every": 3, "training.checkpoint_every": 1}
    keeping["training.max_steps"] = 5
    build(small(keeping), output=tmp_path / "run", device="cpu").train()
    kept = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-00000003", "step-00000005"]


def test_resuming_a_folder_without_a_run_is_refused(small: Small, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no run \(spec.yaml is missing\)"):
        build(small(), output=tmp_path / "nowhere", device="cpu", resume=True)


def test_an_explicit_model_trains_without_a_search(small: Small, tmp_path: Path) -> None:
    explicit = {
        "model": {
            "kind": "explicit_lm",
            "d_model": 16,
            "n_layers": 1,
            "mixer": {"kind": "attention", "n_heads": 2},
        }
    }
    summary = build(small(explicit), output=tmp_path / "run", device="cpu").train()
    assert summary is not None
    assert summary["final"]["iterations"] is None
    assert summary["evaluation"][0]["iterations_by_position"] is None


def test_a_truncated_manifest_is_named(whole: Path, small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "manifest.json").write_text('{"name": ')
    with pytest.raises(RunFolderError, match=r"manifest\.json is truncated .* move it away to continue"):
        build(small(CURRICULUM), output=folder, device="cpu", resume=True)
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_adjoint_solves_are_reported(small: Small, tmp_path: Path) -> None:
    exact = {"model.gradient": {"kind": "implicit_function", "stopping": {"tolerance": 1e-3}}}
    build(small({**exact, "training.max_steps": 2}), output=tmp_path / "run", device="cpu").train()
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert row["adjoint_iterations"] > 1
        assert row["adjoint_residual"] <= row["adjoint_residual_max"]
        assert row["adjoint_non_converged"] == 0 or row["adjoint_residual_max"] > 1e-3


def test_a_kill_while_a_changed_spec_is_written_leaves_a_valid_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(spec={"seed": 1}, manifest={})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folder, "_write_spec", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.record_resume(spec={"seed": 2}, manifest={}, step=4, changes=["seed: 1 → 2"])
    assert "seed: 1" in folder.spec_path.read_text()
    folder.record_resume(spec={"seed": 2}, manifest={}, step=4, changes=["seed: 1 → 2"])
    assert "seed: 2" in folder.spec_path.read_text()
    assert "seed: 1" in (folder.path / "spec.until-step-00000004.yaml").read_text()
