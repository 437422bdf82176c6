"""What an experiment's user hears of an error, in a sentence, and the exit code for it.

Runs fail here as they do by ``python -m trainer``, and with its exit codes.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

from pydantic import ValidationError

from implicit_blocks.contracts import ContractError
from implicit_blocks.specs.errors import explain
from trainer.cli import LOST, NOT_FINITE, NOT_SAVED, REFUSED
from trainer.errors import (
    CallbackError,
    FailedRecordError,
    FailedSaveError,
    LostPeerError,
    NonFiniteLossError,
    PeerError,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def said(error: Exception) -> tuple[str, int] | None:
    """Return what to say and the exit code; None for a mistake in the program, which keeps its traceback."""
    match error:
        case ValidationError():
            return str(explain(error, {}, source="")), REFUSED
        case NonFiniteLossError():
            return f"{error}, by --set", NOT_FINITE
        case FailedSaveError() | FailedRecordError():
            return str(error), NOT_SAVED
        case LostPeerError():
            return str(error), LOST
        case ValueError() | CallbackError() | PeerError() | ContractError():
            return str(error), REFUSED
        case OSError():
            return _of_a_file(error)
    # torch's own error is known by its name, so that torch isn't imported for it; its CPU has a plain one.
    short = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if short or isinstance(error, MemoryError):
        what = str(error).partition(". GPU")[0]
        return f"out of memory ({what}); lower training.micro_batch_size by --set, or the lengths", REFUSED
    return None


def _of_a_file(error: OSError) -> tuple[str, int]:
    if error.errno in _FULL:
        return (
            f"{error.filename or 'the disk'}: {error.strerror}; make room, and give the same command",
            NOT_SAVED,
        )
    if error.filename is None:
        return str(error), REFUSED
    return f"{error.filename}: {error.strerror}; check the path, and what may be done there", REFUSED


def require_drawing() -> None:
    """Refuse to begin where the picture at the end can't be drawn.

    Raises:
        ValueError: matplotlib is missing.

    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the picture needs matplotlib; pip install 'implicit_blocks[train]'")


def require_writable(folder: Path) -> None:
    """Refuse an output that can't be written, before hours of work are done for it. Nothing is made.

    Raises:
        ValueError: it is a file, or lies where no folder can be made.

    """
    place = next(one for one in (folder, *folder.parents) if one.exists())
    if not place.is_dir():
        what = "is a file, not a folder" if place == folder else f"would lie in {place}, which is no folder"
        raise ValueError(f"the output {folder} {what}; give another one by --output")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(
            f"the output {folder} can't be written: no permission in {place}; give another one by --output"
        )
