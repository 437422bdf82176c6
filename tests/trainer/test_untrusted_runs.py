"""Runs, weights and data from other people: reading them executes none of their code."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_with_torch

import implicit_blocks as ib
from implicit_blocks.__main__ import main as library
from implicit_blocks.checkpoints.sharded import expect_one_process, read_whole_tensors
from trainer.cli.train import main
from trainer.data.published_bin import read_published
from trainer.data.token_files import open_shards, write_tokens
from trainer.evaluation.command import main as evaluate
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.files import digest, read_json, sha256_of, write_json

Small = Callable[..., RunSpec]


class Ran:
    """Makes the file ``ran`` when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("ran", "w")


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


# getattr of torch, by a function of the module that has the classes of an index; then a call of os.system.
THROUGH_TORCH = (
    b"\x80\x04"
    + text("torch.distributed.checkpoint.filesystem")
    + text("_get_device_module")
    + b"\x93("
    + text("_import_dotted_name")
    + b"tR("
    + text("os.system")
    + b"tR("
    + text("touch ran")
    + b"tR."
)
PICKLES = {"by a reduction": pickle.dumps(Ran()), "through torch": THROUGH_TORCH}


@pytest.fixture(scope="module")
def stopped(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("stopped") / "run"
    build(small(), output=folder, device="cpu").train(stop_at=2)
    return folder


def seal(checkpoint: Path, **changes: object) -> None:
    """Rewrite the state with the checksums of the current files, as an attacker would."""
    state = {key: value for key, value in read_json(checkpoint / "state.json").items() if key != "digest"}
    names = [file.name for file in checkpoint.iterdir() if file.name != "state.json"]
    state |= changes
    state["files"] = {
        name: {"bytes": (checkpoint / name).stat().st_size, "sha256": sha256_of(checkpoint / name)}
        for name in names
    }
    write_json(checkpoint / "state.json", {**state, "digest": digest(state)})


def with_index(run: Path, content: bytes) -> None:
    """Replace the index of the checkpoint by that of format 2, a pickle."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    tensors = read_whole_tensors(checkpoint)
    for file in [*checkpoint.glob("*.distcp"), checkpoint / "tensors.json"]:
        file.unlink()
    expect_one_process()
    save_with_torch(tensors, storage_writer=FileSystemWriter(checkpoint), no_dist=True)
    if content:
        (checkpoint / ".metadata").write_bytes(content)
    seal(checkpoint, format=2)


def with_tensors(run: Path, content: bytes) -> None:
    """Replace the tensor files of the index by pickles."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    seal(checkpoint)


def load(run: Path) -> int:
    with pytest.raises(ValueError, match="cannot be read"):
        ib.load_model(run)
    return 2


def load_checkpoint(run: Path) -> int:
    with pytest.raises(ValueError, match="cannot be read"):
        ib.load_model(next((run / "checkpoints").iterdir()))
    return 2


READERS: dict[str, Callable[[Path], int]] = {
    "load_model": load,
    "load_model of a checkpoint": load_checkpoint,
    "generate": lambda run: library(["generate", str(run), "0 3 2", "--device", "cpu"]),
    "export": lambda run: library(["export", str(run), str(run.parent / "out")]),
    "--resume": lambda run: main(["--resume", "--output", str(run), "--device", "cpu"]),
    "init_from": lambda run: main(
        ["--spec", str(run / "spec.yaml"), "--output", str(run.parent / "new"), "--device", "cpu",
         f"training.init_from.path={run}"]
    ),
    "evaluate": lambda run: evaluate(
        ["--checkpoint", str(run), "--tokens", str(run.parent / "tokens.bin"), "--lengths", "8"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES.keys())
@pytest.mark.parametrize("prepare", [with_index, with_tensors])
def test_a_prepared_checkpoint_runs_no_code(
    stopped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path, bytes], None],
    content: bytes,
    read: Callable[[Path], int],
) -> None:
    if read is READERS["export"]:
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    write_tokens(tmp_path / "tokens.bin", [1] * 64, vocab_size=6)
    prepare(run, content)
    assert read(run) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert "cannot be read" in message or "load_model" in next(
        name for name in READERS if READERS[name] is read
    )
    assert not list(tmp_path.rglob("ran"))


def test_a_run_with_a_pickled_index_is_resumed(stopped: Path, tmp_path: Path) -> None:
    """The checkpoint is as versions before format 3 wrote it."""
    whole, old = (Path(shutil.copytree(stopped, tmp_path / name)) for name in ("whole", "old"))
    with_index(old, b"")
    for run in (whole, old):
        assert main(["--resume", "--output", str(run), "--device", "cpu"]) == 0
    states = [ib.load_model(run).state_dict() for run in (whole, old)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES.keys())
@pytest.mark.parametrize("name", ["weights.pt", "weights.bin", "weights.safetensors"])
def test_a_prepared_file_of_weights_runs_no_code(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"is not read|cannot be read"):
        ib.load_model(tmp_path / name, spec=stopped / "spec.yaml")
    torch.save({"a": Ran()}, tmp_path / name)
    with pytest.raises(ValueError, match=r"is not read|cannot be read"):
        ib.load_model(tmp_path / name, spec=stopped / "spec.yaml")
    assert not (tmp_path / "ran").exists()


def test_prepared_data_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data.bin"
    one = torch.zeros(1, 2, dtype=torch.int64)
    for content in (
        Ran(),
        {"inputs": Ran(), "targets": one, "vocab_size": torch.tensor(3)},
        {"inputs": one, "targets": one, "vocab_size": torch.tensor([3, 4])},
        {"inputs": one.to_sparse(), "targets": one, "vocab_size": torch.tensor(3)},
        {"inputs": one, "targets": one, "vocab_size": torch.tensor(3.5)},
        {"inputs": one, "targets": one.to("meta"), "vocab_size": torch.tensor(3)},
    ):
        torch.save(content, path)
        for mmap in (False, True):
            with pytest.raises(ValueError, match=r"data\.bin"):
                read_published(path, mmap=mmap)
    for raw in PICKLES.values():
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"data\.bin cannot be read as a torch file"):
            read_published(path)
    array = np.array([Ran(), Ran()], dtype=object)
    np.save(tmp_path / "tokens.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=r"cannot be read as \.npy"):
        open_shards(tmp_path / "tokens.npy")
    (tmp_path / "tokens.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': open(}\n")
    with pytest.raises(ValueError, match=r"cannot be read as \.npy"):
        open_shards(tmp_path / "tokens.npy")
    (tmp_path / "tokens.npy").write_bytes(pickle.dumps(Ran()))
    with pytest.raises(ValueError, match=r"cannot be read as \.npy"):
        open_shards(tmp_path / "tokens.npy")
    assert not (tmp_path / "ran").exists()
