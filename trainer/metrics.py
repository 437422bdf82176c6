"""Metrics as lines of JSON: one object a step in ``metrics.jsonl``, one a set in ``evaluations.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainer.files import write_atomically


def json_value(value: Any) -> Any:
    """Return ``value`` with what JSON can't say, infinity and NaN, as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    return value


def rounded(value: float, digits: int = 6) -> float:
    """Return ``value`` with so many significant digits: what is measured needs no seventeen."""
    return float(f"{value:.{digits}g}")


def epoch_row(epochs: Mapping[str, float]) -> dict[str, float]:
    """Return the columns that say how often the data have been gone through: ``epoch``, or one a source."""
    return {f"epoch_{name}" if name else "epoch": rounded(value) for name, value in epochs.items()}


class MetricsFile:
    """A file of JSON lines, each with a ``step``, appended to in order and readable at any moment.

    Where the disk is full lines are kept in memory, in order, and written once there is room; ``trouble`` is
    what the operating system said, None while all is well.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: OSError | None = None
        self._file: BinaryIO | None = None
        self._pending = b""

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system."""
        self._pending += json.dumps(json_value(row), allow_nan=False).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        try:
            if self._file is None:
                # Without a buffer of its own: nothing is lost or doubled where a write fails half way.
                self._file = self.path.open("ab", buffering=0)
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            self.trouble = error
        else:
            self.trouble = None

    def truncate_after(self, step: int) -> None:
        """Drop later steps' lines, and a last line cut short, so that a resumed run has each step once."""
        self.close()
        if self.path.exists():
            kept = [
                json.dumps(row, allow_nan=False) + "\n"
                for row in read_metrics(self.path)
                if row["step"] <= step
            ]
            write_atomically(self.path, "".join(kept))

    def rows(self) -> list[dict[str, Any]]:
        """Return the objects of all lines."""
        return list(read_metrics(self.path)) if self.path.exists() else []

    def last_row(self) -> dict[str, Any] | None:
        """Return the latest line's object, or None where there is none."""
        rows = self.rows()
        return rows[-1] if rows else None

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._pending:
            self._push()
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file; a last line that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
