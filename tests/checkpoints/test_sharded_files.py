"""Sharded checkpoints: tensors are read whole, and reading executes no code."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import save as save_with_torch

from implicit_blocks.checkpoints.sharded import expect_one_process, read_whole_tensors, tensor_index
from implicit_blocks.checkpoints.tensor_index import INDEX, PICKLED_INDEX
from trainer.checkpoint.folder import STATE_FILE, TrainingProgress, step_name, verify_checkpoint
from trainer.checkpoint.load import load_checkpoint, read_model_tensors
from trainer.checkpoint.writer import Checkpointer
from trainer.errors import CheckpointError
from trainer.storage.files import digest, read_json, sha256_of, write_json


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 3).bfloat16())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = Checkpointer(tmp_path, model=model, optimizer=optimizer, spec_digest="d", keep=1)
    writer.save(TrainingProgress(step=1))
    writer.wait()
    return tmp_path / step_name(1), model


def seal(path: Path, *, step: int | None = None, **changes: Any) -> None:
    """Rewrite the state with the checksums of the current files."""
    state = {key: value for key, value in read_json(path / STATE_FILE).items() if key != "digest"} | changes
    if step is not None:
        state["progress"]["step"] = step
    names = [file.name for file in path.iterdir() if file.name != STATE_FILE]
    state["files"] = {
        name: {"bytes": (path / name).stat().st_size, "sha256": sha256_of(path / name)} for name in names
    }
    write_json(path / STATE_FILE, {**state, "digest": digest(state)})


def as_format_2(path: Path) -> None:
    """Convert a checkpoint to format 2, whose index is the pickle that torch writes."""
    tensors = read_whole_tensors(path)
    for file in [*path.glob("*.distcp"), path / INDEX]:
        file.unlink()
    expect_one_process()
    save_with_torch(tensors, storage_writer=FileSystemWriter(path), no_dist=True)
    seal(path, format=2)


def test_saved_tensors_are_read_back_with_their_dtypes(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    for found in (read_whole_tensors(path, prefix="model/"), read_model_tensors(path)):
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
    assert tuple(tensor_index(path, prefix="model/")["0.weight"].size) == (2, 3)
    assert read_whole_tensors(path, prefix="optimizer/") == {}


def test_the_trainer_writes_no_pickled_index(saved: tuple[Path, nn.Module]) -> None:
    path, _ = saved
    assert sorted(file.name for file in path.iterdir()) == [
        "__0_0.distcp", "rank-00000.json", "state.json", "tensors.json",
    ]  # fmt: skip
    entry = json.loads((path / INDEX).read_text())["tensors"]["model/0.weight"]
    assert (entry["dtype"], entry["shape"]) == ("float32", [2, 3])


def test_a_checkpoint_of_format_2_is_read(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    as_format_2(path)
    assert (path / PICKLED_INDEX).is_file()
    assert not (path / INDEX).exists()
    found = read_model_tensors(path)
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    other = small_model()
    assert load_checkpoint(path, model=other) == TrainingProgress(step=1)
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])


# ------------------------------------------------------------------------------------ malicious pickles


def _text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def _name(module: str, name: str) -> bytes:
    """Return STACK_GLOBAL of protocol 4, whose name may contain dots."""
    return _text(module) + _text(name) + b"\x93"


def _call(function: bytes, *arguments: str) -> bytes:
    return function + b"(" + b"".join(map(_text, arguments)) + b"tR"


_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA = "torch.distributed.checkpoint.metadata"
_RUN = "touch ran"
_IMPORTED = _call(_call(_name(_FILESYSTEM, "_get_device_module"), "_import_dotted_name"), "os.system")

ATTACKS: dict[str, bytes] = {
    "os.system": _call(_name("os", "system"), _RUN),
    "posix.system by GLOBAL": b"cposix\nsystem\n(" + _text(_RUN) + b"tR",
    "eval": _call(_name("builtins", "eval"), "open('ran', 'w')"),
    "torch's device module": b"\x80\x04" + _IMPORTED + b"(" + _text(_RUN) + b"tR",
    "dotted name": _call(_name(_METADATA, "os.system"), _RUN),
    "dotted name of a class": _call(_name(_METADATA, "Metadata.__init__.__globals__"), _RUN),
    "a module's import": _call(_name(_FILESYSTEM, "os"), _RUN),
    "a function of the module": _call(_name(_FILESYSTEM, "_generate_uuid")),
    "torch.load": _call(_name("torch", "load"), "x"),
    "torch's imports": _call(_name("torch", "_import_dotted_name"), "os.system"),
    "getattr": _call(_name("builtins", "getattr"), "x", "y"),
    "a layout that is called": _call(_call(_name("torch.serialization", "_get_layout"), "os.system"), _RUN),
    "a type of tensors that is called": _call(_name("torch", "float32"), _RUN),
    "INST": b"(" + _text(_RUN) + b"ios\nsystem\n",
    "OBJ": b"(" + _name("os", "system") + _text(_RUN) + b"o",
    "NEWOBJ": _name("subprocess", "Popen") + b"(" + _text(_RUN) + b"t\x81",
    "persistent id": b"Pos.system\n",
    "extension": b"\x82\x01",
    "a class that is changed": _name(_METADATA, "Metadata")
    + b"N}" + _text("read_metadata") + _IMPORTED[: len(_name(_FILESYSTEM, "x"))] + b"s\x86b",
    "a class's slots": _name(_METADATA, "TensorProperties") + b"N}" + _text("__init__") + b"Ns\x86b",
    "a state of another kind": _name(_METADATA, "Metadata") + b")\x81" + _text("state") + b"b",
    "gigabytes by a number": b"\x80\x04\x96" + (2**40).to_bytes(8, "little"),
    "a memo of gigabytes": b"Nr\xff\xff\xff\x7f",
    "a deep tuple": b"N" + b"\x85" * 100_000,
    "a deep dictionary": b"N" + b"(K\x01K\x02dK\x01" * 3,
    "another value": pickle.dumps({"a": 1})[:-1],
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_malicious_pickled_index_executes_no_code(
    saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch, attack: bytes
) -> None:
    path, _ = saved
    monkeypatch.chdir(path)
    as_format_2(path)
    before = {name: dict(vars(getattr(torch_metadata, name))) for name in ("Metadata", "TensorProperties")}
    (path / PICKLED_INDEX).write_bytes(attack + b"." * bool(attack))
    seal(path)
    for read in (read_whole_tensors, read_model_tensors, tensor_index):
        with pytest.raises(ValueError, match=r"\.metadata .*index"):
            read(path)  # type: ignore[operator]  # the functions return different types
    with pytest.raises(ValueError, match="index"):
        load_checkpoint(path, model=small_model())
    assert not (path / "ran").exists()
    for name, values in before.items():
        assert dict(vars(getattr(torch_metadata, name))) == values


def _edit(index: dict[str, Any], **changes: Any) -> dict[str, Any]:
    index = copy.deepcopy(index)
    entry = index["tensors"]["model/0.weight"]
    for key, value in changes.items():
        (entry if key in entry else entry["chunks"][0])[key] = value
    return index


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda index: [], "it is not a JSON object of format 1"),
        (lambda index: {**index, "format": 2}, "it is not a JSON object of format 1"),
        (lambda index: {**index, "tensors": []}, "tensors is not a mapping"),
        (lambda index: _edit(index, dtype="os.system"), "unknown type 'os.system'"),
        (lambda index: _edit(index, shape=[2, -3]), "sizes that are not non-negative integers"),
        (lambda index: _edit(index, shape=[2, True]), "sizes that are not non-negative integers"),
        (lambda index: _edit(index, shape=[20, 30]), "do not cover its shape"),
        (lambda index: _edit(index, offsets=[1, 0]), "exceeds its shape"),
        (lambda index: _edit(index, offsets=[0]), "a different number of dimensions"),
        (lambda index: _edit(index, chunks=[]), "do not cover its shape"),
        (lambda index: _edit(index, chunks=7), "has no list of chunks"),
        (lambda index: _edit(index, bytes=3), "too few bytes for its shape"),
        (lambda index: _edit(index, file="../elsewhere.distcp"), "is not a file in this folder"),
        (lambda index: _edit(index, file="/etc/passwd"), "is not a file in this folder"),
        (lambda index: _edit(index, file=["x"]), "is not a file in this folder"),
    ],
)
def test_an_invalid_json_index_is_refused(
    saved: tuple[Path, nn.Module], change: Callable[[Any], Any], complaint: str
) -> None:
    path, _ = saved
    write_json(path / INDEX, change(read_json(path / INDEX)))
    with pytest.raises(ValueError, match=complaint):
        tensor_index(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", r"tensors\.json is truncated or not JSON"),
        (b"\xff\xfe", r"tensors\.json is truncated or not JSON"),
        (b"[" * 200_000, r"tensors\.json is nested too deeply"),
        (None, r"contains no tensors: tensors\.json is missing"),
    ],
    ids=["empty", "no text", "nested", "missing"],
)
def test_a_damaged_json_index_is_refused_by_name(
    saved: tuple[Path, nn.Module], content: bytes | None, complaint: str
) -> None:
    path, _ = saved
    (path / INDEX).unlink()
    if content is not None:
        (path / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        tensor_index(path)


def test_a_malicious_tensor_file_executes_no_code(
    saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    monkeypatch.chdir(path)
    file = path / "__0_0.distcp"
    for content in (ATTACKS["os.system"] + b".", b"", b"PK\x03\x04" + bytes(200)):
        file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
        seal(path)
        with pytest.raises(ValueError, match=r"cannot be read; a file is missing or truncated"):
            load_checkpoint(path, model=small_model())
        with pytest.raises(ValueError, match=r"cannot be read; a file is missing or truncated"):
            read_model_tensors(path)
    assert not (path / "ran").exists()


def test_a_checkpoint_cannot_list_files_outside_its_directory(saved: tuple[Path, nn.Module]) -> None:
    path, _ = saved
    shutil.copy(path / INDEX, path.parent / "elsewhere")
    state = {key: value for key, value in read_json(path / STATE_FILE).items() if key != "digest"}
    state["files"]["../elsewhere"] = state["files"][INDEX]
    write_json(path / STATE_FILE, {**state, "digest": digest(state)})
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere' is not a plain file name"):
        verify_checkpoint(path)


def test_an_unknown_checkpoint_format_is_refused(saved: tuple[Path, nn.Module]) -> None:
    path, _ = saved
    seal(path, format=1)
    with pytest.raises(CheckpointError, match=r"format 1.*2 and 3"):
        verify_checkpoint(path)
