"""Writing files so that a crash at any moment leaves the old content or the new one, never half of either."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from implicit_blocks.checkpoints.find import read_json as read_json  # beside `write_json`


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's list of entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LinkError(OSError):
    """A file that is to be written is a link or something else than a file."""


def open_own(path: Path, flags: int) -> int:
    """Open a file for writing and return its descriptor; a link is not followed.

    A run's folder may come from elsewhere, and a link in it must not make the trainer write into other files.

    Raises:
        LinkError: the path is a symbolic link, a folder, a pipe or a device.
        OSError: the file can't be opened.

    """
    # Without O_NONBLOCK opening a pipe that nobody reads would wait for a reader.
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, flags | extra, 0o666)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise _link_error(path) from None
        raise error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _link_error(path)
    return descriptor


def _link_error(path: Path) -> LinkError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return LinkError(
        f"{path} is {kind}, and is not written to; remove it, or put the file itself in its place"
    )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a new file beside ``path``, which takes its place at the end, on the disk, or is removed.

    The temporary file has a random name and is created exclusively. Where ``path`` is a link the link is
    replaced, and the file that it names stays as it is.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    descriptor = open_own(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through a temporary file beside it."""
    content = text.encode()
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN and infinity, which JSON lacks, are refused."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
