"""Error messages and exit codes of the experiments.

Runs fail with the messages and exit codes of ``python -m trainer``.
"""

from __future__ import annotations

from pydantic import ValidationError

from implicit_blocks.specs.errors import format_error
from trainer.cli.exit_codes import NOT_SAVED, REFUSED, code_of, short_of_memory
from trainer.errors import NonFiniteLossError


def describe_error(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code for an error; None for a bug, which keeps its traceback."""
    code = code_of(error)
    if code is None and isinstance(error, ValueError | OSError) and not isinstance(error, BrokenPipeError):
        code = REFUSED  # requests are validated throughout
    return None if code is None else (_message(error, code), code)


def _message(error: Exception, code: int) -> str:
    if isinstance(error, ValidationError):
        return str(format_error(error, {}, source=""))
    if isinstance(error, NonFiniteLossError):
        return f"{error}, by --set"
    if isinstance(error, OSError) and code == NOT_SAVED:
        return f"{error.filename or 'the disk'}: {error.strerror}; free disk space and run the command again"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    if (short := short_of_memory(error)) is not None:
        return f"out of memory ({short}); lower training.micro_batch_size by --set, or the lengths"
    return str(error)
