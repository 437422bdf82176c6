"""Locks on folders: one process at a time works in a folder, and a killed process leaves no lock."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from trainer.storage.files import open_own

LOCK = ".lock"
"""Usual name of the lock file in a folder."""


class LockedError(ValueError):
    """The lock is held by another process, or by this one.

    Attributes:
        holder: the process and since when, as recorded in the lock file.

    """

    def __init__(self, path: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{path} is held by {holder}; wait for it, or stop it")


class FolderLock:
    """A lock on the file ``path``, held from its creation to :meth:`release` or the end of the process.

    It is a lock of the operating system, which ends with the process even if that is killed: a killed run can
    be resumed immediately. Child processes do not hold it. The file stays and records the latest holder.

    Args:
        path: the lock file, created if missing; its folder must exist.
        wait: wait for the holder to release the lock instead of raising.

    Raises:
        LockedError: the lock is held, by another process or by this one, and ``wait`` is False.
        OSError: the file cannot be written, or is a symbolic link.

    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self.path = path
        self.trouble: str | None = None
        """Why the lock is not available, as on some network file systems; None: it is held."""
        self._lock: FileLock | None = None
        os.close(open_own(path, os.O_RDWR | os.O_CREAT))  # filelock refuses links, but not pipes
        lock = FileLock(str(path), timeout=-1 if wait else 0, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            raise LockedError(path, _read_holder(path)) from None
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return
        self._lock = lock
        _record_holder(path)

    def release(self) -> None:
        """Release the lock, if it is held."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _record_holder(path: Path) -> None:
    """Write the holder to the file, for the error of other processes; skipped on a full disk."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        file = open_own(path, os.O_RDWR)
        try:
            if os.fstat(file).st_nlink == 1:  # else a hard link to a file with other content
                os.ftruncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)
        finally:
            os.close(file)


def _read_holder(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(200).decode("utf-8", "replace").strip() or "an unknown process"
