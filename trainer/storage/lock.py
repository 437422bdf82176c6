"""Locks of folders: one process at a time works in one, and a process that was killed leaves none behind."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from trainer.storage.files import open_own

LOCK = ".lock"
"""The usual name of the file, in the folder."""


class LockedError(ValueError):
    """Somebody else, mostly another process, works in the folder.

    Attributes:
        holder: which one, and since when, as far as its file tells.

    """

    def __init__(self, path: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{path} is held by {holder}; wait for it, or stop it")


class FolderLock:
    """The lock on the file ``path``: held from when it is made to :meth:`release`, or to the process's end.

    It is the kernel's (``flock``), so that it ends with the process however that ends: a run that was killed
    is gone on with at once. Programs that this process starts don't inherit it (what it merely forks does).
    The file stays, with a line that says who holds the lock, or held it last.

    Args:
        path: the file, made where it is not there; its folder must be.
        wait: for whoever holds the lock, rather than refuse.

    Raises:
        LockedError: it is held, by another process or by this one, and was not to be waited for.
        OSError: the file can't be written, or is a link, which is not followed.

    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self.path = path
        self.trouble: str | None = None
        """Why there is no lock: some network file systems have none, nor has Windows. None: it is held."""
        self._file: int | None = None
        try:
            import fcntl
        except ImportError:
            self.trouble = "this system has no flock"
            return
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            _sign(file)
        except OSError as error:
            holder = _read(file)
            os.close(file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockedError(path, holder) from None
            self.trouble = error.strerror or str(error)
        except BaseException:
            os.close(file)
            raise
        else:
            self._file = file

    def release(self) -> None:
        """Give the lock back; nothing happens where it is not held."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _sign(file: int) -> None:
    """Say in the file who holds it, for those who are refused; on a full disk they are not told."""
    if os.fstat(file).st_nlink > 1:  # the file is elsewhere too, and may hold something else there
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)


def _read(file: int) -> str:
    return os.pread(file, 200, 0).decode("utf-8", "replace").strip() or "a process that didn't say its number"
