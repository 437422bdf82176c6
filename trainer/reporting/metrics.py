"""Metrics as JSON lines: one object per step in ``metrics.jsonl``, one per set in ``evaluations.jsonl``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainer.storage.files import open_own, replacing

_AT_ONCE = 1 << 14
"""Block size in bytes for reading a file from its end."""


def json_value(value: Any) -> Any:
    """Return ``value`` with None in place of infinity and NaN, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    return value


def rounded(value: float, digits: int = 6) -> float:
    """Return ``value`` rounded to ``digits`` significant digits."""
    return float(f"{value:.{digits}g}")


def grows_to_improve(metric: str) -> bool:
    """Whether larger values of a column of evaluations are better, as of accuracies, unlike losses."""
    return "accuracy" in metric or metric in ("token_converged", "token_within")


def epoch_row(epochs: Mapping[str, float]) -> dict[str, float]:
    """Return the columns for the passes over the data: ``epoch``, or ``epoch_<name>`` for each source."""
    return {f"epoch_{name}" if name else "epoch": rounded(value) for name, value in epochs.items()}


class MetricsFile:
    """A file of JSON lines, each with a ``step``, that can be read while it is written.

    If the disk is full, lines are kept in memory and written in order once there is space. ``trouble`` is the
    error of the last write, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: OSError | None = None
        self._file: BinaryIO | None = None
        self._pending = b""

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Append one line per row, all in one write to the operating system."""
        for row in rows:
            self._pending += json.dumps(json_value(row), allow_nan=False).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        try:
            if self._file is None:
                # Unbuffered: nothing is lost or repeated if a write fails halfway.
                descriptor = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                self._file = os.fdopen(descriptor, "ab", buffering=0)
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            self.trouble = error
        else:
            self.trouble = None

    def truncate_after(self, step: int) -> None:
        """Remove lines of later steps and an incomplete last line, so that each step occurs once."""
        self.close()
        if not self.path.exists():
            return
        with os.fdopen(open_own(self.path, os.O_RDWR), "r+b") as file:
            kept, last = 0, b"\n"
            for line, end in _lines_from_the_end(file):
                if (row := _object_of(line)) is not None and row["step"] <= step:
                    kept, last = end, line
                    break
            if os.fstat(file.fileno()).st_nlink > 1:  # another hard link to the file must not change
                file.seek(0)
                with replacing(self.path) as own:
                    for begin in range(0, kept, _AT_ONCE):
                        own.write(file.read(min(_AT_ONCE, kept - begin)))
                    own.write(b"" if last.endswith(b"\n") else b"\n")
                return
            file.truncate(kept)
            if not last.endswith(b"\n"):
                file.seek(kept)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(
        self,
        *,
        required: Collection[str] = (),
        numbers: Collection[str] = (),
        damaged: Callable[[str], None] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the objects of all lines; see :func:`read_metrics`."""
        if self.path.exists():
            yield from read_metrics(self.path, required=required, numbers=numbers, damaged=damaged)

    def last_row(self) -> dict[str, Any] | None:
        """Return the object of the last complete line, or None; reads only the end of the file."""
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            return next((row for line, _ in _lines_from_the_end(file) if (row := _object_of(line))), None)

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        if self._pending:
            self._push()
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(
    path: Path,
    *,
    required: Collection[str] = (),
    numbers: Collection[str] = (),
    damaged: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file lazily, without a last line that a crash left incomplete.

    Args:
        path: the file.
        required: keys that every row must have in addition to ``step``.
        numbers: keys whose values must be numbers or null where present.
        damaged: called with a message for each invalid line, which is then skipped; None: an invalid line is
            an error.

    Raises:
        ValueError: a line is invalid; names the first one.

    """
    broken: str | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if broken is not None:
                _complain(broken, damaged)
                broken = None
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                broken = f"{path}, line {number}: not JSON ({error})"
                continue
            if (fault := _row_fault(row, required, numbers)) is None:
                yield row
            else:
                _complain(f"{path}, line {number}: {fault}", damaged)


def _complain(complaint: str, damaged: Callable[[str], None] | None) -> None:
    if damaged is None:
        raise ValueError(f"{complaint}; the file was altered or damaged: repair the line, or remove it")
    damaged(complaint)


def _row_fault(row: Any, required: Collection[str] = (), numbers: Collection[str] = ()) -> str | None:
    """Return why a JSON value is not a valid row of metrics, or None."""
    if not isinstance(row, dict):
        return f"expected a JSON object, got a {type(row).__name__}"
    if type(row.get("step")) is not int:
        return f"step must be an integer, got {row.get('step')!r}"
    if missing := [name for name in required if name not in row]:
        return f"missing {', '.join(missing)}"
    if not isinstance(row.get("phase", ""), str):
        return f"phase must be a string, got {row['phase']!r}"
    for name in numbers:
        value = row.get(name)
        sound = value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)
        if not sound:
            return f"{name} must be a number, got {str(value)[:50]}"
    return None


def _lines_from_the_end(file: BinaryIO, *, at_once: int = _AT_ONCE) -> Iterator[tuple[bytes, int]]:
    """Yield a file's lines and their end positions, last line first, without reading the whole file."""
    end = position = file.seek(0, os.SEEK_END)
    rest = b""
    while position > 0:
        size = min(at_once, position)
        position -= size
        file.seek(position)
        first, *others = (file.read(size) + rest).splitlines(keepends=True)
        for line in reversed(others):
            yield line, end
            end -= len(line)
        rest = first
    if rest:
        yield rest, end


def _object_of(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if the line is incomplete or not a valid row of metrics."""
    try:
        row: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return None if _row_fault(row) is not None else row
