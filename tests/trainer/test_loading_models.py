"""``ib.load_model`` of a run, a checkpoint, an export, a published folder, a file of weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

import implicit_blocks as ib
from trainer.checkpoint.load import read_model_tensors
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]

PHASES = [{"name": "bounded", "until": 2}, {"name": "free", "model": {"stopping": {"max_iterations": 9}}}]


@pytest.fixture(scope="module")
def run(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("trained") / "run"
    build(small({"training.checkpoint_every": 2, "phases": PHASES}), output=folder, device="cpu").train()
    return folder


def assert_holds(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("place", "step"),
    [("", 4), ("checkpoints/step-00000004", 4), ("checkpoints/step-00000002", 2)],
    ids=["run", "newest", "older"],
)
def test_a_run_or_one_of_its_checkpoints_is_loaded(run: Path, place: str, step: int) -> None:
    model = ib.load_model(run / place)
    assert isinstance(model, ib.ImplicitLM)
    assert not model.training
    assert_holds(model, read_model_tensors(run / "checkpoints" / f"step-{step:08d}"))
    assert model.spec.stopping.max_iterations == 9  # that of the last phase
    assert ib.generate(model, [[0, 3, 2], [5]], max_new_tokens=2).tokens.shape == (2, 2)


def test_a_loaded_model_can_be_trained(run: Path) -> None:
    model = ib.load_model(str(run)).train()
    tokens = torch.randint(6, (2, 8))
    model(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_older_checkpoint_is_loaded_if_the_newest_is_damaged(run: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    next((damaged / "checkpoints" / "step-00000004").glob("*.distcp")).unlink()
    with pytest.warns(UserWarning, match=r"__0_0\.distcp is missing; reading step-00000002 instead"):
        model = ib.load_model(damaged)
    assert_holds(model, read_model_tensors(run / "checkpoints" / "step-00000002"))


def test_a_file_of_weights_with_a_spec_is_loaded(run: Path, tmp_path: Path) -> None:
    tensors = read_model_tensors(run / "checkpoints" / "step-00000004")
    save_file(tensors, tmp_path / "model.safetensors")
    for spec in (run / "spec.yaml", ib.load_spec(run / "spec.yaml").model):
        assert_holds(ib.load_model(tmp_path / "model.safetensors", spec=spec), tensors)
    with pytest.raises(ValueError, match=r"has no model spec; pass spec .*--spec\)"):
        ib.load_model(tmp_path / "model.safetensors")
    spec = ib.load_spec(run / "spec.yaml").model.model_dump(mode="json")
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(spec))  # as the trainer's exports have it
    assert_holds(ib.load_model(tmp_path), tensors)
    assert_holds(ib.load_model(tmp_path / "model.safetensors"), tensors)


def test_a_pretrained_folder_is_loaded(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from implicit_blocks.hf import from_library

    model = ib.load_model(run)
    from_library(model).save_pretrained(tmp_path / "exported")
    assert_holds(ib.load_model(tmp_path / "exported"), model.state_dict())
    with pytest.raises(ValueError, match=r"contains its own spec; omit spec .*--spec\)"):
        ib.load_model(tmp_path / "exported", spec="word_problem_s3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda place: place / "nowhere", "does not exist; give a run"),
        (lambda place: place, "has no model spec"),
        (lambda place: _run_without_checkpoints(place), "has no checkpoint yet"),
        (lambda place: _not_a_model(place), "is not the spec of a model"),
        (lambda place: _run_without_checkpoints(place) / "spec.yaml", "is a spec without weights"),
    ],
    ids=["nothing", "an empty folder", "a run without checkpoints", "a spec of something else", "a spec"],
)
def test_a_path_that_is_not_a_model_is_refused(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ib.load_model(make(tmp_path))


def _run_without_checkpoints(place: Path) -> Path:
    (place / "checkpoints").mkdir()
    (place / "spec.yaml").write_text("extends: word_problem_s3\n")
    return place


def _not_a_model(place: Path) -> Path:
    (place / "model.yaml").write_text("kind: picard\n")
    return place


def test_tensors_of_another_model_are_listed(run: Path) -> None:
    with pytest.raises(ValueError, match=r"embedding.weight has shape \(6, 16\), expected"):
        ib.load_model(run, spec="word_problem_s3")
