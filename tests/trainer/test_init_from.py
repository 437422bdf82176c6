"""Runs that start with the weights of another run or file."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from implicit_blocks.checkpoints.find import list_checkpoints
from implicit_blocks.specs import ExplicitLMSpec, load_spec
from trainer.checkpoint import export as exporting
from trainer.checkpoint.load import read_model_tensors
from trainer.errors import CheckpointError, RunFolderError
from trainer.estimate.dry_run import dry_run_report
from trainer.reporting.metrics import read_metrics
from trainer.run import init_from as start
from trainer.run.build import build
from trainer.run.init_from import Origin, find_start, require_fitting
from trainer.specs.run import RunSpec
from trainer.specs.training import InitFromSpec

Small = Callable[..., RunSpec]

BOUNDED = {"gradient": {"kind": "unrolled", "steps": 2}}
STEADY: dict[str, Any] = {
    "training.schedule": {"kind": "warmup_constant_sqrt", "warmup": 0, "decay": 0},
}


def last(folder: Path) -> Path:
    return list_checkpoints(folder / "checkpoints")[-1]


def losses(folder: Path) -> list[tuple[float, float, int]]:
    return [
        (row["loss"], row["gradient_norm"], row["samples"]) for row in read_metrics(folder / "metrics.jsonl")
    ]


def manifest(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return read


@pytest.fixture(scope="module")
def bounded(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the bounded phase alone: four steps."""
    folder: Path = tmp_path_factory.mktemp("bounded") / "run"
    changes = {**STEADY, "phases": [{"name": "bounded", "model": BOUNDED}], "training.export_every": 4}
    build(small(changes), output=folder, device="cpu").train()
    return folder


def starting(path: Any, **more: Any) -> dict[str, Any]:
    return {**STEADY, "training.init_from": path if isinstance(path, dict) else str(path), **more}


def test_a_free_run_started_from_a_bounded_one_equals_one_run(
    bounded: Path, small: Small, tmp_path: Path
) -> None:
    phases = [{"name": "bounded", "until": 4, "model": BOUNDED}, {"name": "free"}]
    build(
        small({**STEADY, "phases": phases, "training.max_steps": 7}), output=tmp_path / "one", device="cpu"
    ).train()
    start = {"path": str(bounded), "optimizer": True, "position": True}
    changes = starting(start, **{"phases": [{"name": "free"}], "training.max_steps": 3})
    build(small(changes), output=tmp_path / "two", device="cpu").train()
    assert losses(tmp_path / "two") == losses(tmp_path / "one")[4:]
    origin = manifest(tmp_path / "two")["started_from"]
    assert (origin["path"], origin["form"], origin["step"]) == (str(last(bounded).resolve()), "checkpoint", 4)
    assert (origin["phase"], origin["samples"], origin["tokens"]) == ("bounded", 32, 384)
    assert len(origin["sha256"]) == 64


def test_weights_alone_start_a_new_run(bounded: Path, small: Small, tmp_path: Path) -> None:
    run = build(small(starting(bounded)), output=tmp_path / "run", device="cpu")
    stored = read_model_tensors(last(bounded))
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    assert not run.loop.optimizer.state
    assert run.loop.progress.samples == run.loop.progress.step == 0
    assert load_spec(tmp_path / "run" / "spec.yaml").training.init_from.path == str(bounded)


def test_weights_of_a_run_are_read_without_transformers(
    bounded: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("folders", "pretrained"):
        monkeypatch.setitem(sys.modules, f"implicit_blocks.hf.{name}", None)
    run = build(small(starting(bounded)), output=tmp_path / "run", device="cpu")
    assert manifest(tmp_path / "run")["started_from"]["form"] == "checkpoint"
    run.folder.release()


@pytest.mark.parametrize("source", ["checkpoint", "export", "plain", "file"])
def test_weights_are_read_from_exports_and_files(
    bounded: Path, small: Small, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = last(bounded)
    if source == "export":
        pytest.importorskip("transformers", reason="the extra hf is not installed")
        path = bounded / "exports" / "step-00000004"
    elif source in ("plain", "file"):
        monkeypatch.setattr(exporting, "_write_for_transformers", lambda *args: False)
        exported = build(small({"training.export_every": 4, **starting(bounded)}), output=tmp_path / "other")
        exported.loop._export()
        path = tmp_path / "other" / "exports" / "step-00000000"
        path = path / "model.safetensors" if source == "file" else path
    run = build(small(starting(path)), output=tmp_path / "run", device="cpu")
    stored = read_model_tensors(last(bounded))
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    assert manifest(tmp_path / "run")["started_from"]["sha256"]
    if source != "checkpoint":
        with pytest.raises(ValueError, match="holds weights only, no optimizer; choose a run"):
            build(small(starting({"path": str(path), "optimizer": True})), output=tmp_path / "no")


def test_an_explicit_run_starts_an_implicit_one(small: Small, tmp_path: Path) -> None:
    explicit = small().model_dump(mode="json")
    fields = {"kind": "explicit_lm", "d_model": 16, "n_layers": 1}
    mixer = {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}
    spec = RunSpec.model_validate({**explicit, "model": {**fields, "mixer": mixer}})
    first = build(spec, output=tmp_path / "explicit", device="cpu")
    first.train()
    implicit = {"model.z_init": "embedding", "model.gradient": {"kind": "unrolled", "steps": 1}}
    run = build(small(starting(tmp_path / "explicit", **implicit)), output=tmp_path / "run", device="cpu")
    tokens = torch.arange(6)[None]
    # With one iteration it is the explicit model: its search begins at the embedding, nothing is injected.
    torch.testing.assert_close(run.model.train()(tokens).logits, first.model.train()(tokens).logits)
    assert not run.model.injection(run.model.embedding(tokens)).any()
    assert run.train() is not None
    with pytest.raises(CheckpointError, match=r"set model\.z_init=embedding"):
        build(small(starting(tmp_path / "explicit")), output=tmp_path / "no")
    start = {"path": str(tmp_path / "explicit"), "optimizer": True}
    with pytest.raises(ValueError, match=r"has no state for the result; .*init_from\.optimizer=false"):
        build(small(starting(start, **implicit)), output=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.d_model": 32}, r"another model \(model.d_model: 16 → 32\)"),
        ({"model.mixer.d_state": 4}, r"another model \(model.mixer.d_state: 8 → 4\)"),
        ({"training.init_from": "nowhere"}, "nowhere does not exist"),
        ({"training.init_from": "empty"}, "is not a run, a checkpoint or an exported folder"),
    ],
)
def test_unsuitable_initial_weights_are_refused_before_writing(
    bounded: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    spec = small({**starting(bounded), **changes})
    with pytest.raises(ValueError, match=message):
        build(spec, output=tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match=message):
        dry_run_report(spec, name="run")
    assert not (tmp_path / "run").exists()


def test_tensors_that_differ_are_all_listed(bounded: Path, small: Small, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in read_model_tensors(last(bounded)).items()}
    gone, *_ = sorted(tensors)
    del tensors[gone]
    path = tmp_path / "other.safetensors"
    save_file({**tensors, "extra": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError) as caught:
        build(small(starting(path)), output=tmp_path / "run", device="cpu")
    assert f"{gone} is missing" in str(caught.value)
    assert "extra is unknown, (2,)" in str(caught.value)


def test_another_optimizers_state_is_refused(bounded: Path, small: Small, tmp_path: Path) -> None:
    shutil.copytree(bounded, tmp_path / "other")
    spec = (tmp_path / "other" / "spec.yaml").read_text()
    (tmp_path / "other" / "spec.yaml").write_text(spec.replace("kind: adamw", "kind: acme"))
    start = {"path": str(tmp_path / "other"), "optimizer": True}
    with pytest.raises(ValueError, match="acme"):
        build(small(starting(start)), output=tmp_path / "run", device="cpu")


def test_optimizer_state_requires_the_same_optimizer_and_unconverted_weights(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small()
    explicit = ExplicitLMSpec.model_validate(
        {k: v for k, v in spec.model.model_dump().items() if k in ExplicitLMSpec.model_fields}
        | {"kind": "explicit_lm"}
    )
    asked = InitFromSpec(path=str(tmp_path), optimizer=True)
    found = Origin(tmp_path, "checkpoint", model=spec.model, optimizer="acme")
    monkeypatch.setattr(start, "_find", lambda path: found)
    with pytest.raises(ValueError, match="has the state of 'acme', this run's optimizer is 'adamw'"):
        find_start(asked, spec)
    find_start(asked.model_copy(update={"optimizer": False}), spec)
    found = found._replace(optimizer="adamw")
    find_start(asked, spec)
    found = found._replace(model=explicit)
    with pytest.raises(ValueError, match="of kind 'explicit_lm', are converted here"):
        find_start(asked, small({"model.z_init": "embedding"}))


def test_weight_norm_is_added_to_an_explicit_start_and_not_taken_away(small: Small, tmp_path: Path) -> None:
    for ours, theirs, fits in ((True, False, True), (True, True, True), (False, True, False)):
        implicit = small({"model.z_init": "embedding", "model.weight_norm": ours}).model
        fields = {k: v for k, v in implicit.model_dump().items() if k in ExplicitLMSpec.model_fields}
        explicit = ExplicitLMSpec.model_validate({**fields, "kind": "explicit_lm", "weight_norm": theirs})
        if fits:
            require_fitting(explicit, implicit, path=tmp_path)
        else:
            with pytest.raises(CheckpointError, match="weight_norm: True → False"):
                require_fitting(explicit, implicit, path=tmp_path)


def test_a_run_without_checkpoints_loads_its_initial_weights_again(
    bounded: Path, small: Small, tmp_path: Path
) -> None:
    build(small(starting(bounded)), output=tmp_path / "run", device="cpu")
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    build(small(starting(bounded)), output=tmp_path / "run", device="cpu", resume=True).train(stop_at=2)
    build(small(starting(bounded)), output=tmp_path / "whole", device="cpu").train()
    # Once the run has begun, the other run is neither needed nor replaceable.
    with pytest.raises(RunFolderError, match="has started already, so its initial weights can't change"):
        build(small(starting(tmp_path)), output=tmp_path / "run", device="cpu", resume=True)
    build(small(starting(bounded)), output=tmp_path / "run", device="cpu", resume=True).train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_dry_run_says_where_it_starts(bounded: Path, small: Small) -> None:
    report = dry_run_report(small(starting(bounded)), name="free")
    assert f"weights of {last(bounded)} after 384 tokens" in report


@pytest.mark.parametrize("kind", ["explicit_lm", "implicit_lm"])
def test_a_llama_of_transformers_is_a_valid_start(kind: str, small: Small, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    config = transformers.LlamaConfig(
        vocab_size=6, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path / "llama")
    model: dict[str, Any] = {
        "kind": kind, "d_model": 16, "n_layers": 1, "norm_eps": 1e-6, "tie_embeddings": False,
        "mixer": {"kind": "attention", "n_heads": 2, "n_kv_heads": 2, "rope_theta": 1e4},
        "mlp": {"kind": "swiglu", "d_ff": 24},
    }  # fmt: skip
    if kind == "implicit_lm":
        model |= {"z_init": "embedding", "stopping": {"max_iterations": 2}}
    run = build(small(starting(tmp_path / "llama", model=model)), output=tmp_path / "run", device="cpu")
    origin = manifest(tmp_path / "run")["started_from"]
    assert (origin["form"], origin["step"], len(origin["sha256"])) == ("transformers", None, 64)
    if kind == "explicit_lm":
        tokens = torch.arange(6)[None]
        with torch.no_grad():
            torch.testing.assert_close(run.model.eval()(tokens).logits, llama(tokens).logits)
    assert run.train() is not None
