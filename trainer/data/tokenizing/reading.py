"""Reading inputs: text in blocks, and rows of jsonl, parquet and Hugging Face datasets, with their places.

A place names a row in messages, such as ``line 3 of chat.jsonl``.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from implicit_blocks._utils.own_packages import install_extra

_BLOCK = 1 << 18  # characters per read

Row = tuple[str, Mapping[str, Any]]
"""The place of a row, and its fields."""
Select = Callable[[Sequence[str], str], list[str]]
"""Returns the needed fields among those that a place has; raises a ValueError if they are missing."""
Report = Callable[[float], None]
"""Called with the fraction of a file that has been read."""


def blocks_of_text(path: Path, report: Report) -> Iterator[str]:
    """Yield decompressed text in blocks, with line ends normalized to line feeds.

    Raises:
        ValueError: the file is truncated, of another format, or not UTF-8.

    """
    with _opened(path, report) as file:
        try:
            while block := file.read(_BLOCK):
                yield block
        except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise _unreadable(path, error) from error


def rows_of_jsonl(path: Path, select: Select, report: Report) -> Iterator[Row]:
    """Yield the objects of a jsonl file; empty lines are skipped.

    Raises:
        ValueError: a line is not an object with the needed fields; as `blocks_of_text`.

    """
    with _opened(path, report) as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"line {number} of {path}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    why = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON ({error})"
                    raise ValueError(f"{place} is {why}; jsonl has one object per line") from error
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{place} is a JSON {type(row).__name__}; jsonl has one object with named fields per "
                        "line"
                    )
                select(list(row), place)
                yield place, row
        except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise _unreadable(path, error, f" after line {number}") from error


def rows_of_parquet(path: Path, select: Select, report: Report) -> Iterator[Row]:
    """Yield the rows of a parquet file, with the needed columns only.

    Raises:
        ValueError: the columns are missing, the file cannot be read, or the package is missing.

    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise _needs_pyarrow(path) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = select(file.schema_arrow.names, str(path))
            number, rows = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    yield f"row {number} of {path}", row
                    number += 1
                report(number / rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def rows_of_dataset(
    name: str, select: Select, report: Report, *, split: str, config: str | None
) -> Iterator[Row]:
    """Yield the rows of a Hugging Face dataset, streamed: nothing is stored on the disk.

    Raises:
        ValueError: the dataset cannot be read, or lacks the needed fields.

    """
    place = f"dataset {name}"
    dataset = load_dataset(name, split=split, config=config, streaming=True)
    total = _rows_in(dataset, split)
    columns = dataset.column_names
    if columns is not None:  # None: known only from the first row
        dataset = dataset.select_columns(select(columns, place))
    rows = iter(dataset)
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the package raises whatever reading and downloading raise
            raise ValueError(
                f"{place} cannot be read after row {number} ({type(error).__name__}: {error}); run the same "
                "command again when it is available"
            ) from error
        if row is None:
            return
        if columns is None:
            select(list(row), f"row {number} of {name}")
        yield f"row {number} of {name}", row
        number += 1
        if total and number % 1000 == 0:
            report(min(1.0, number / total))


def _rows_in(dataset: Any, split: str) -> int | None:
    """Return the number of rows that the dataset declares, if any."""
    splits = getattr(dataset.info, "splits", None) or {}
    found = splits.get(split)
    return None if found is None else found.num_examples


def load_dataset(name: str, *, split: str, config: str | None, streaming: bool) -> Any:
    """Open a Hugging Face dataset: a `save_to_disk` directory, a directory of data files, or a Hub name.

    Raises:
        ValueError: the package is missing, or the dataset or split does not exist.

    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"reading dataset {name} needs the package datasets; install it by {install_extra('data')}"
        ) from error
    try:
        if is_dataset(Path(name)):
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise ValueError(f"it has no split {split!r}; available: {', '.join(map(str, loaded))}")
                loaded = loaded[split]
            return loaded.to_iterable_dataset() if streaming else loaded
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the package raises whatever reading and downloading raise
        raise ValueError(f"dataset {name} cannot be opened: {error}") from error


def is_dataset(path: Path) -> bool:
    """Return whether a directory was written by `save_to_disk` of the package datasets."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


@contextmanager
def _opened(path: Path, report: Callable[[float], None]) -> Iterator[IO[str]]:
    """Open a text file, decompressed, with line feeds as line ends and without a byte-order mark."""
    with ExitStack() as stack:
        raw = stack.enter_context(io.BufferedReader(_Reported(path, report), 1 << 20))
        opened: Any = raw
        if path.suffix == ".xz":
            opened = stack.enter_context(lzma.LZMAFile(raw))
        elif path.suffix == ".gz":
            opened = stack.enter_context(gzip.GzipFile(fileobj=raw))
        elif path.suffix == ".bz2":
            opened = stack.enter_context(bz2.BZ2File(raw))
        elif path.suffix == ".zst":
            try:
                import pyarrow
            except ImportError as error:
                raise _needs_pyarrow(path) from error
            opened = stack.enter_context(pyarrow.CompressedInputStream(raw, "zstd"))
        yield stack.enter_context(io.TextIOWrapper(opened, encoding="utf-8-sig", newline=None))


class _Reported(io.FileIO):
    """A file that reports how much of it has been read."""

    def __init__(self, path: Path, report: Callable[[float], None]) -> None:
        super().__init__(path)
        self._size, self._report = path.stat().st_size or 1, report

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._report(min(1.0, self.tell() / self._size))
        return count


def _unreadable(path: Path, error: BaseException, where: str = "") -> ValueError:
    if isinstance(error, UnicodeDecodeError):
        return ValueError(f"{path} is not UTF-8{where} ({error}); convert it first, for example by iconv")
    return ValueError(
        f"{path} cannot be read{where} ({error}): truncated or of another format; copy it again"
    )


def _needs_pyarrow(path: Path) -> ValueError:
    return ValueError(f"reading {path.name} needs the package pyarrow; install it by {install_extra('data')}")
