"""The files in which trained models lie: what they are called, and whether a checkpoint's are whole.

Imports no torch, so that the trainer's dry run can look for a model too; what is in the files is read by
``implicit_blocks.checkpoints.load_model``.
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
"""Of a folder that ``from_pretrained`` reads."""
SAFETENSORS = "model.safetensors"
"""The weights, there and in the trainer's exports."""
TOKENIZER = "tokenizer.json"
"""Beside weights in a folder of transformers, and beside token files."""
BYTES = "bytes"
"""The name of the tokenizer that needs no file: UTF-8 bytes as ids 0 to 255, and 256 at the end of a text."""
MANIFEST = "manifest.json"
"""Beside token files: which tokenizer made them, among others."""
MODEL = "model.yaml"
"""The spec of the model, beside the weights of an export."""
SPEC = "spec.yaml"
"""The spec of a run, in its folder."""
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
RECORD = "state.json"
"""Where a checkpoint says, under ``files``, how large its files are, and their checksums."""
MODEL_PREFIX = "model/"
"""What the names of the model's tensors begin with in a checkpoint."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first, without what a killed run left half written."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit())


def plain_name(name: str) -> bool:
    """Return whether ``name`` is that of a file in the folder at hand: no path that leads elsewhere."""
    return name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", ":", "\0"))


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``.

    Raises:
        ValueError: naming the file, where it is cut short, is not JSON, or is nested too deeply.

    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is cut short or not JSON: {error}") from None


def read_newest(
    folder: Path, require: Callable[[Path], object], read: Callable[[Path], T], *, seconds: float = 60.0
) -> tuple[Path, T, list[str]] | tuple[None, None, list[str]]:
    """Read the newest checkpoint in ``folder`` that is whole, even while a run saves and removes checkpoints.

    A run that keeps one checkpoint removes it as soon as the next is whole. Where a checkpoint can't be read
    and the folder has changed since it was listed, the folder is listed again.

    Args:
        folder: of the checkpoints.
        require: raises a ValueError for a checkpoint that can't be used; the one before is tried then.
        read: reads the checkpoint that was let pass; its errors are raised.
        seconds: how long to try while the folder keeps changing.

    Returns:
        The checkpoint, what ``read`` returned, and what ``require`` said of each newer one; None and None
        where there is no checkpoint that can be used.

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
    """Return the checkpoints in ``folder``, oldest first, with what tells one from another of its name."""
    for attempt in range(5):
        found: dict[Path, int] = {}
        for path in list_checkpoints(folder):
            try:
                found[path] = path.stat().st_ino
            except OSError:  # removed since it was listed
                continue
        if found or not folder.is_dir():
            break
        time.sleep(0.002 * attempt)  # a listing can miss one that comes while another goes
    return found


def newest_sound(folder: Path, require: Callable[[Path], object]) -> tuple[Path | None, list[str]]:
    """Return the last checkpoint that ``require`` lets pass, if any, and what it says of each one behind it.

    As :func:`read_newest`, for what is read later.
    """
    path, _, complaints = read_newest(folder, require, lambda path: path)
    return path, complaints


def first_fault(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Say which of ``files`` is not as it was written, by ``bytes`` and ``sha256`` of each; None: all are."""
    for name, written in files.items():
        if not plain_name(name):
            return f"{name!r} is not the name of a file in it"
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != written["bytes"]:
            kind = "cut short" if size < written["bytes"] else "altered"
            return f"{name} is {kind}: {size} bytes where {written['bytes']} were written"
        with file.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != written["sha256"]:
                return f"{name} was altered since it was written (checksum)"
    return None


def require_whole(checkpoint: Path) -> None:
    """Refuse a checkpoint without a record of its files, or with one that is not as the record says.

    Raises:
        ValueError: naming the file.

    """
    path = checkpoint / RECORD
    if not path.is_file():
        raise ValueError(f"{checkpoint} is not whole: {RECORD} is missing")
    try:
        files = read_json(path)["files"]
        recorded = {
            name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is cut short or no record of files: {error}") from None
    if fault := first_fault(checkpoint, recorded):
        raise ValueError(f"{checkpoint} is not whole: {fault}")
