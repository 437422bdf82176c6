"""How the trainer's programs end: their exit codes, and which failures are said in a sentence. No torch."""

from __future__ import annotations

import errno
import sys

from implicit_blocks.registry.contracts import ContractError
from trainer.errors import (
    CallbackError,
    DataError,
    FailedRecordError,
    FailedSaveError,
    LostPeerError,
    NonFiniteLossError,
    PeerError,
)

LOST = 1
REFUSED = 2
NOT_FINITE = 3
NOT_SAVED = 4
TO_BE_RESUMED = 75
"""What ``sysexits.h`` calls a temporary failure: ask again later."""
INTERRUPTED = 130

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def code_of(error: Exception) -> int | None:
    """Return the exit code for what can go wrong in a run.

    None for all else: in a run, a ``ValueError`` too is a mistake in the program, and keeps its traceback.
    """
    match error:
        case NonFiniteLossError():
            return NOT_FINITE
        case FailedSaveError() | FailedRecordError():
            return NOT_SAVED
        case LostPeerError():
            return LOST
        case DataError() | CallbackError() | PeerError() | ContractError():
            return REFUSED
        case OSError():
            return NOT_SAVED if error.errno in _NO_ROOM else None
    return None if short_of_memory(error) is None else REFUSED


def short_of_memory(error: Exception) -> str | None:
    """Return what was short, where an error says that a device or the host is out of memory."""
    # torch's own error is known by its name, so that torch isn't imported for it; its CPU has a plain one.
    by_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return str(error).partition(". GPU")[0] if by_torch or isinstance(error, MemoryError) else None


def refuse(message: str, code: int = REFUSED) -> int:
    """Say why a program ends, and return its exit code."""
    print(f"error: {message}", file=sys.stderr)
    return code
