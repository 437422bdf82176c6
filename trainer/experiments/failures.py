"""What an experiment's user hears of an error, in a sentence, and the exit code for it.

Runs fail here as they do by ``python -m trainer``, and with its exit codes.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pydantic import ValidationError

from implicit_blocks._utils.own_parts import install_extra
from implicit_blocks.specs.errors import format_error
from trainer.cli.exit_codes import NOT_SAVED, REFUSED, code_of, short_of_memory
from trainer.errors import NonFiniteLossError


def message(error: Exception) -> tuple[str, int] | None:
    """Return what to say and the exit code; None for a mistake in the program, which keeps its traceback."""
    code = code_of(error)
    if code is None and isinstance(error, ValueError | OSError):  # requests are checked all along
        code = REFUSED
    return None if code is None else (_words(error, code), code)


def _words(error: Exception, code: int) -> str:
    if isinstance(error, ValidationError):
        return str(format_error(error, {}, source=""))
    if isinstance(error, NonFiniteLossError):
        return f"{error}, by --set"
    if isinstance(error, OSError) and code == NOT_SAVED:
        return f"{error.filename or 'the disk'}: {error.strerror}; make room, and give the same command"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, and what may be done there"
    if (short := short_of_memory(error)) is not None:
        return f"out of memory ({short}); lower training.micro_batch_size by --set, or the lengths"
    return str(error)


def require_drawing() -> None:
    """Refuse to begin where the picture at the end can't be drawn.

    Raises:
        ValueError: matplotlib is missing.

    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"the picture needs matplotlib; {install_extra('train')}")


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
