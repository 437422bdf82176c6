"""Atomic writes: after a crash at any moment a file has its old or its new content."""

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
    """Sync the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LinkError(OSError):
    """A file to be written is a symbolic link or not a regular file."""


def open_own(path: Path, flags: int) -> int:
    """Open a file for writing without following a symbolic link; return its descriptor.

    A run's folder may come from another person, and a link in it must not redirect writes to other files.

    Raises:
        LinkError: the path is a symbolic link, a folder, a pipe or a device.
        OSError: the file cannot be opened.

    """
    # Without O_NONBLOCK, opening a pipe would wait for a reader.
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
        f"{path} is {kind}, which the trainer does not write to; remove it, or replace it by a regular file"
    )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file beside ``path``; sync it and rename it to ``path`` at the end, or remove it.

    The temporary file has a random name and is created exclusively. If ``path`` is a link, the link is
    replaced and its target does not change.
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
    """Write ``value`` as indented JSON, atomically; NaN and infinity are refused."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
