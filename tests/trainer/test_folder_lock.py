"""One process at a time uses a folder: others are refused or wait, and a killed process leaves no lock."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.errors import RunFolderError
from trainer.reporting.display import Display
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.lock import FolderLock, LockedError
from trainer.storage.run_folder import RunFolder, folder_to_resume

fcntl = pytest.importorskip("fcntl", reason="file locks of POSIX")


class Heard(Display):
    def __init__(self) -> None:
        self.words: list[str] = []

    def log(self, text: str) -> None:
        self.words.append(text)


@contextmanager
def held_by_another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    program = (
        "import sys, time; from pathlib import Path; from trainer.storage.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with held_by_another_process(path) as other:
        with pytest.raises(LockedError, match=rf"process {other.pid} on .*, since 20\d\d") as refused:
            FolderLock(path)
        assert str(path) in str(refused.value)
        other.send_signal(signal.SIGKILL)
        other.wait()
        with FolderLock(path) as own:
            assert own.trouble is None
            assert path.read_text().startswith(f"process {os.getpid()} on ")  # and nothing of the one before
            assert path.read_text().count("\n") == 1


def test_a_lock_is_released_by_its_block_or_its_last_reference(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with FolderLock(path):
        pass
    lock = FolderLock(path)
    with pytest.raises(LockedError):
        FolderLock(path)  # of this process, too
    del lock
    lock = FolderLock(path)
    lock.release()
    lock.release()
    FolderLock(path).release()


def test_an_earlier_holder_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("process 123456789 on a machine with a rather long name, since a moment long ago" * 3)
    with FolderLock(path), pytest.raises(LockedError) as caught:
        FolderLock(path)
    assert caught.value.holder.startswith(f"process {os.getpid()} on ")
    assert path.read_text().count("process") == path.read_text().count("\n") == 1


def test_a_process_waits_for_a_lock(tmp_path: Path) -> None:
    first, order = FolderLock(tmp_path / ".lock"), list[str]()

    def wait() -> None:
        with FolderLock(tmp_path / ".lock", wait=True):
            order.append("second")

    second = threading.Thread(target=wait)
    second.start()
    second.join(0.2)
    order.append("first")
    first.release()
    second.join(30)
    assert order == ["first", "second"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with FolderLock(tmp_path / ".lock") as lock:
            assert lock.trouble == os.strerror(code)


# ------------------------------------------------------------------------------------ of a run


def test_one_process_at_a_time_resumes_a_run(tmp_path: Path, small: Callable[..., RunSpec]) -> None:
    folder, spec = tmp_path / "run", small()
    build(spec, output=folder, display=Display()).train(stop_at=2)
    before = {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }
    with held_by_another_process(folder / ".lock") as other:
        with pytest.raises(RunFolderError, match=r"is in progress already \(process \d+ on") as refused:
            build(spec, output=folder, resume=True, display=Display())
        assert f"process {other.pid} on" in str(refused.value)
        assert f"remove {folder / '.lock'}" in str(refused.value)
        assert all(path.read_bytes() == content for path, content in before.items())
    run = build(spec, output=folder, resume=True, display=Display())
    with pytest.raises(RunFolderError, match=f"process {os.getpid()} on"):  # from its building on
        build(spec, output=folder, resume=True, display=Display())
    assert run.train(stop_at=3) is None
    assert run.train() is not None  # the lock is held again
    FolderLock(folder / ".lock").release()


def test_a_run_that_could_not_be_built_releases_its_lock(
    tmp_path: Path, small: Callable[..., RunSpec]
) -> None:
    folder = tmp_path / "run"
    build(small(), output=folder, display=Display()).train(stop_at=2)
    other = small({"model.d_model": 32})
    with pytest.raises(RunFolderError, match="another model") as refused:
        build(other, output=folder, resume=True, display=Display())
    assert refused.value.__traceback__ is not None  # its frames are alive: no garbage collection has happened
    FolderLock(folder / ".lock").release()


def test_only_one_of_two_new_runs_gets_a_folder(
    tmp_path: Path, small: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs find the folder unused; the first one to claim it gets it."""
    from trainer.run import build as module

    folder, spec = tmp_path / "run", small()
    parts = module.make_parts

    def slow_parts(*args: object, **options: object) -> object:
        monkeypatch.setattr(module, "make_parts", parts)
        build(spec, output=folder, display=Display()).folder.release()
        return parts(*args, **options)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(module, "make_parts", slow_parts)
    with pytest.raises(RunFolderError, match="already holds a run"):
        build(spec, output=folder, display=Display())


def test_a_run_started_while_waiting_for_the_folder_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(folder, "hold", lambda: folder.spec_path.write_text("kind: run"))
    with pytest.raises(RunFolderError, match="already holds a run"):
        folder.create(spec={}, manifest={})
    assert folder.spec_path.read_text() == "kind: run"


def test_a_run_is_found_by_name_beside_runs_of_longer_names(tmp_path: Path) -> None:
    for name in ("s3-20260101-000000", "s3-long-20260101-000001", "s3-explicit-20260101-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").touch()
    (tmp_path / "s3-20260102-000000").mkdir()  # no run
    assert folder_to_resume("s3", root=tmp_path).name == "s3-20260101-000000"


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, small: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    heard = Heard()
    build(small(), output=tmp_path / "run", display=heard).train(stop_at=1)
    (warning,) = [message for message in heard.words if "can't be locked" in message]
    assert os.strerror(errno.ENOLCK) in warning
    assert "no other process trains in it" in warning
