"""Names of the files of trained models, and checks that a checkpoint is complete.

Imports no torch, so that the trainer's dry run can look for a model; ``implicit_blocks.checkpoints.weights``
reads the files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CONFIG = "config.json"
"""The configuration in a folder that ``from_pretrained`` reads."""
SAFETENSORS = "model.safetensors"
"""The weights in such a folder and in the trainer's exports."""
TOKENIZER = "tokenizer.json"
"""The tokenizer, beside weights in a transformers folder or beside token files."""
BYTES = "bytes"
"""The name of the tokenizer without a file: UTF-8 bytes as IDs 0 to 255, and 256 at the end of a text."""
MANIFEST = "manifest.json"
"""A description of token files beside them, which names their tokenizer."""
MODEL = "model.yaml"
"""The spec of the model, beside the weights of an export."""
SPEC = "spec.yaml"
"""The spec of a run, in the run folder."""
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
RECORD = "state.json"
"""The record of a checkpoint, which lists the sizes and checksums of its files under ``files``."""
MODEL_PREFIX = "model/"
"""The prefix of the names of the model's tensors in a checkpoint."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first, without partially written ones."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit())


def plain_name(name: str) -> bool:
    """Return whether ``name`` is a plain file name and not a path to another folder."""
    return name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", ":", "\0"))


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``.

    Raises:
        ValueError: the file is truncated, not JSON, or nested too deeply; the message names it.

    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is truncated or not JSON: {error}") from None


def read_newest(
    folder: Path, require: Callable[[Path], object], read: Callable[[Path], T], *, seconds: float = 60.0
) -> tuple[Path, T, list[str]] | tuple[None, None, list[str]]:
    """Read the newest complete checkpoint in ``folder``, even while a run saves and removes checkpoints.

    A run that keeps one checkpoint removes it as soon as the next one is complete. If a checkpoint cannot be
    read and the folder has changed since it was listed, the folder is listed again.

    Args:
        folder: contains the checkpoints.
        require: raises a ValueError for an unusable checkpoint; then the previous one is tried.
        read: reads a checkpoint that passed ``require``; its errors propagate.
        seconds: time limit for retries while the folder keeps changing.

    Returns:
        The checkpoint, the result of ``read``, and the errors of ``require`` for newer checkpoints; None and
        None if no checkpoint is usable.

    """
    end = time.monotonic() + seconds
    while True:
        listed = _identities(folder)
        complaints: list[str] = []
        failure: Exception | None = None
        for path in reversed(listed):
            try:
                require(path)
            except (ValueError, OSError) as error:
                complaints.append(str(error))
                if _identities(folder) != listed:
                    break
                continue
            try:
                return path, read(path), complaints
            except (ValueError, OSError) as error:
                failure = error
            break
        if _identities(folder) == listed or time.monotonic() > end:
            if failure is not None:
                raise failure
            return None, None, complaints


def _identities(folder: Path) -> dict[Path, int]:
    """Return the checkpoints in ``folder``, oldest first, with identities that change on replacement."""
    for attempt in range(5):
        found: dict[Path, int] = {}
        for path in list_checkpoints(folder):
            try:
                found[path] = path.stat().st_ino
            except OSError:  # removed since it was listed
                continue
        if found or not folder.is_dir():
            break
        time.sleep(0.002 * attempt)  # a listing can miss a checkpoint that appears while another is removed
    return found


def newest_sound(folder: Path, require: Callable[[Path], object]) -> tuple[Path | None, list[str]]:
    """Return the last checkpoint that passes ``require``, or None, and the errors for each newer one.

    As :func:`read_newest`, for checkpoints that are read later.
    """
    path, _, complaints = read_newest(folder, require, lambda path: path)
    return path, complaints


def first_fault(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Describe the first of ``files`` that differs from its recorded ``bytes`` or ``sha256``, or None."""
    for name, written in files.items():
        if not plain_name(name):
            return f"{name!r} is not a plain file name"
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != written["bytes"]:
            kind = "truncated" if size < written["bytes"] else "altered"
            return f"{name} is {kind}: expected {written['bytes']} bytes, found {size}"
        with file.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != written["sha256"]:
                return f"{name} has changed since it was written (checksum mismatch)"
    return None


def require_whole(checkpoint: Path) -> None:
    """Raise an error for a checkpoint that has no record of its files or does not match its record.

    Raises:
        ValueError: the checkpoint is incomplete or damaged; the message names the file.

    """
    path = checkpoint / RECORD
    if not path.is_file():
        raise ValueError(f"{checkpoint} is incomplete: {RECORD} is missing")
    try:
        files = read_json(path)["files"]
        recorded = {
            name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is truncated or not a record of files: {error}") from None
    if fault := first_fault(checkpoint, recorded):
        raise ValueError(f"{checkpoint} is incomplete: {fault}")
