"""The files in which trained models lie: what they are called, and whether a checkpoint's are whole.

Imports no torch, so that the trainer's dry run can look for a model too; what is in the files is read by
``implicit_blocks.saved_models``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def newest_sound(
    checkpoints: Sequence[Path], require: Callable[[Path], object]
) -> tuple[Path | None, list[str]]:
    """Return the last checkpoint that ``require`` lets pass, if any, and what it says of each one behind it.

    Args:
        checkpoints: oldest first.
        require: raises a ValueError for one that can't be used.

    """
    complaints: list[str] = []
    for path in reversed(checkpoints):
        try:
            require(path)
        except ValueError as error:
            complaints.append(str(error))
        else:
            return path, complaints
    return None, complaints


def first_fault(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Say which of ``files`` is not as it was written, by ``bytes`` and ``sha256`` of each; None: all are."""
    for name, written in files.items():
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
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        recorded = {
            name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is cut short or no record of files: {error}") from None
    if fault := first_fault(checkpoint, recorded):
        raise ValueError(f"{checkpoint} is not whole: {fault}")
