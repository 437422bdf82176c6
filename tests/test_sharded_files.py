"""Reading what several processes wrote: whole tensors, and no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from implicit_blocks.sharded_files import INDEX, read_whole_tensors, tensor_index
from trainer.checkpoint import Checkpointer, Progress, read_model_tensors, step_name, verify_checkpoint
from trainer.checkpoint_folder import STATE_FILE
from trainer.errors import CheckpointError
from trainer.files import digest, read_json, write_json


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 3).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = Checkpointer(tmp_path, model=model, optimizer=optimizer, spec_digest="d", keep=1)
    writer.save(Progress(step=1))
    writer.wait()
    return tmp_path / step_name(1), model


def test_tensors_come_back_with_their_types(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    for found in (read_whole_tensors(path, prefix="model/"), read_model_tensors(path)):
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
    assert tuple(tensor_index(path, prefix="model/")["0.weight"].size) == (2, 3)
    assert read_whole_tensors(path, prefix="optimizer/") == {}


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_an_index_runs_no_code(saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved
    monkeypatch.chdir(path)
    (path / INDEX).write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r"cannot be read as an index .*system"):
        read_whole_tensors(path)
    assert not (path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "cannot be read as an index"), (pickle.dumps({"a": 1}), "it holds a dict"), (None, "is missing")],
)
def test_a_damaged_index_is_named(
    saved: tuple[Path, nn.Module], content: bytes | None, complaint: str
) -> None:
    path, _ = saved
    (path / INDEX).unlink()
    if content is not None:
        (path / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        tensor_index(path)


def test_a_checkpoint_of_another_format_says_so(saved: tuple[Path, nn.Module]) -> None:
    path, _ = saved
    state = {key: value for key, value in read_json(path / STATE_FILE).items() if key != "digest"}
    state["format"] = 1
    write_json(path / STATE_FILE, {**state, "digest": digest(state)})
    with pytest.raises(CheckpointError, match="has format 1, this version reads format 2; resume with"):
        verify_checkpoint(path)
