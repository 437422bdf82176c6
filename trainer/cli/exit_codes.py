"""Exit codes of the trainer's programs, and the errors reported without a traceback. Imports no torch."""

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
"""``EX_TEMPFAIL`` of ``sysexits.h``: a temporary failure; try again later."""
INTERRUPTED = 130

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # EFBIG: the limit of ulimit -f


def code_of(error: Exception) -> int | None:
    """Return the exit code for an expected error of a run, or None.

    Any other error, including a ``ValueError`` during a run, is a bug and keeps its traceback.
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
    """Return the message of an out-of-memory error of a device or the host; None for other errors."""
    # torch's error is recognized by its name, so that torch is not imported; on the CPU it is a RuntimeError.
    by_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return str(error).partition(". GPU")[0] if by_torch or isinstance(error, MemoryError) else None


def refuse(reason: str | Exception, code: int = REFUSED) -> int:
    """Print why a program ends and return its exit code; ``run_program`` handles a broken pipe."""
    if isinstance(reason, BrokenPipeError):
        raise reason
    if isinstance(reason, OSError) and reason.errno in _NO_ROOM:
        reason = f"{reason}; free disk space, or choose another place by --output"
    print(f"error: {reason}", file=sys.stderr)
    return code
