"""Links in a prepared run folder do not make the trainer write or remove files elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.checkpoint.folder import list_checkpoints
from trainer.cli.train import main
from trainer.data.manifest import read_manifest
from trainer.data.tokenizing.command import main as tokenize
from trainer.reporting.metrics import MetricsFile, read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.files import LinkError, open_own, replacing, write_json
from trainer.storage.lock import FolderLock

Small = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def stopped(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that was stopped at step 2 of 4."""
    folder: Path = tmp_path_factory.mktemp("stopped") / "run"
    changes = {"evaluation.lengths": [12], "evaluation.sequences": 2}
    spec = small({**changes, "training.checkpoint_every": 2, "training.export_every": 4})
    build(spec, output=folder, device="cpu").train(stop_at=2)
    return folder


@pytest.fixture
def prepared(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text('{"step": 999, "mine": true}\n')
    return path


def resume(folder: Path) -> int:
    return main(["--resume", "--output", str(folder), "--device", "cpu"])


# Atomic writes replace the link; writes in place reject it.
REPLACED = ["manifest.json", "summary.json", "report.png", ".manifest.json.tmp", ".summary.json.tmp"]
REFUSED = [".lock", "metrics.jsonl", "evaluations.jsonl"]


@pytest.mark.parametrize("name", [*REPLACED, *REFUSED])
@pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])
def test_resuming_does_not_change_the_target_of_a_link(
    prepared: Path, victim: Path, name: str, hard: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    link = prepared / name
    if name == "manifest.json":
        shutil.copy(link, victim)
    before = victim.read_bytes()
    link.unlink(missing_ok=True)
    link.hardlink_to(victim) if hard else link.symlink_to(victim)
    code = resume(prepared)
    assert victim.read_bytes() == before
    if name in REFUSED and not hard:
        assert code == 2
        assert f"{link} is a symbolic link, which the trainer does not write to" in capsys.readouterr().err
    else:
        assert code == 0
        assert victim.is_file()


def test_a_dangling_link_creates_no_file(prepared: Path, tmp_path: Path) -> None:
    for name in ("evaluations.jsonl", "summary.json"):
        (prepared / name).unlink(missing_ok=True)
        (prepared / name).symlink_to(tmp_path / "made")
    resume(prepared)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["checkpoints", "exports", "profiles"])
def test_a_folder_that_is_a_link_is_refused(
    prepared: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    if (prepared / name).exists():
        (prepared / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (elsewhere / "mine.tmp-").mkdir()
    (prepared / name).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert resume(prepared) == 2
    assert f"{name} is a symbolic link, but a run writes only inside" in capsys.readouterr().err
    assert sorted(elsewhere.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/step-00000004",
        "checkpoints/step-00000004.tmp-save",
        "checkpoints/step-00000001",
        "checkpoints/left-step-00000009",
        "exports/step-00000004",
        "exports/step-00000004.tmp-save",
    ],
)
def test_links_at_the_names_of_checkpoints_and_exports(prepared: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    (prepared / "checkpoints" / "step-00000009").mkdir()  # is set aside
    (prepared / name).parent.mkdir(exist_ok=True)
    (prepared / name).symlink_to(elsewhere)
    assert resume(prepared) == 0
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    assert any((prepared / "exports" / "step-00000004").glob("*.safetensors"))
    assert not (prepared / "exports" / "step-00000004").is_symlink()
    assert not (prepared / "checkpoints" / "step-00000004").is_symlink()
    assert list_checkpoints(prepared / "checkpoints")


def test_a_pipe_does_not_make_the_trainer_wait(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prepared / "evaluations.jsonl").unlink(missing_ok=True)
    os.mkfifo(prepared / "evaluations.jsonl")
    assert resume(prepared) == 2
    assert "evaluations.jsonl is not a regular file" in capsys.readouterr().err


def test_a_hard_linked_file_is_copied_before_it_is_truncated(tmp_path: Path) -> None:
    """Resuming a run whose files are hard links, as of a backup, does not change the linked files."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(*({"step": step, "text": "x" * 9000} for step in range(1, 6)))
    file.close()
    backup = tmp_path / "backup"
    backup.hardlink_to(file.path)
    before = backup.read_bytes()
    file.truncate_after(4)
    file.write({"step": 5, "again": True})
    file.close()
    assert backup.read_bytes() == before
    assert [row["step"] for row in read_metrics(file.path)] == [1, 2, 3, 4, 5]


def test_temporary_files_are_exclusive_and_have_random_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for _ in range(2):
        with replacing(tmp_path / "a.json") as file:
            names += [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"]
            file.write(b"{}")
    assert len(set(names)) == 2
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / ".a.json.known.tmp").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="is a symbolic link"):
        write_json(tmp_path / "a.json", {})
    assert not (tmp_path / "made").exists()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="in the middle"), replacing(tmp_path / "a.json"):
        raise RuntimeError("in the middle")
    assert (tmp_path / "a.json").read_bytes() == b"{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.json.known.tmp", "a.json"]


def test_permissions_are_those_of_a_new_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {})
    (tmp_path / "b.json").write_text("{}")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b.json").stat().st_mode


def test_a_lock_follows_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(LinkError, match="is a symbolic link"):
        FolderLock(tmp_path / ".lock")
    with pytest.raises(LinkError, match="is not a regular file"):
        open_own(tmp_path, os.O_RDONLY)


def test_tokenizing_follows_no_link(tmp_path: Path, victim: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 50)
    output = tmp_path / "tokens"
    command = [str(text), "--tokenizer", "bytes", "--output", str(output)]
    assert tokenize(command) == 0
    (folder,) = {path.parent for path in output.rglob("manifest.json")}
    before = read_manifest(folder)
    for path in folder.iterdir():
        path.unlink()
    for name in (".shard_00000.bin.tmp", ".shard_00000.documents.tmp", ".manifest.json.tmp"):
        (folder / name).symlink_to(victim)
    content = victim.read_bytes()
    tokenize(command)
    assert victim.read_bytes() == content
    assert read_manifest(folder) == before


def test_a_data_manifest_stays_in_its_folder(tmp_path: Path) -> None:
    manifest: dict[str, Any] = {
        "format": 1,
        "dtype": "uint16",
        "tokenizer": {"sha256": "0" * 64},
        "shards": [
            {"file": "../a.bin", "tokens": 1, "documents": 1, "sha256": "", "documents_sha256": ""},
        ],
    }
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(ValueError, match=r"'\.\./a\.bin' is not the name of a file in this directory"):
        read_manifest(tmp_path)


def test_the_spec_of_a_resumed_run_replaces_a_link(prepared: Path, victim: Path) -> None:
    shutil.copy(prepared / "spec.yaml", victim)
    (prepared / "spec.yaml").unlink()
    (prepared / "spec.yaml").symlink_to(victim)
    (prepared / "spec.until-step-00000002.yaml").symlink_to(victim)
    before = victim.read_bytes()
    command = ["--resume", "--output", str(prepared), "--device", "cpu", "training.log_every=3"]
    assert main(command) == 0
    assert victim.read_bytes() == before
    assert yaml.safe_load((prepared / "spec.yaml").read_text())["training"]["log_every"] == 3
