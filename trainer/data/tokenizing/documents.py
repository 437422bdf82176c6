"""Documents from plain text, jsonl, parquet and Hugging Face datasets, optionally compressed.

Text is read in pieces of bounded size, see `trainer.data.tokenizing.pieces`.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from implicit_blocks._utils.own_parts import install_extra
from trainer.data.tokenizing.pieces import Piece, cut, whole, with_text
from trainer.storage.files import sha256_of

_BLOCK = 1 << 18  # characters per read
_GLIMPSE = 1 << 16  # bytes

Format = Literal["auto", "text", "jsonl", "parquet", "dataset"]

_SUFFIXES: dict[str, Format] = {
    ".txt": "text", ".text": "text", ".md": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
_COMPRESSED = (".xz", ".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class Source:
    """One input, a file or a dataset (path or Hub name), and its format."""

    name: str
    path: Path | None
    format: Format

    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint of the input, for detecting changes.

        For local inputs it consists of their size and a digest of the beginning, middle and end of each file,
        because reading everything would take as long as tokenizing. For Hub datasets it is the name alone.
        """
        found: dict[str, Any] = {"name": self.name, "format": self.format}
        if self.path is None:
            return found
        files = [self.path] if self.path.is_file() else sorted(f for f in self.path.rglob("*") if f.is_file())
        seen = hashlib.sha256()
        for file in files:
            inside = file.relative_to(self.path).as_posix()
            seen.update(f"{inside} {file.stat().st_size}\n".encode())
            for part in _glimpses(file):
                seen.update(part)
        return {**found, "bytes": sum(file.stat().st_size for file in files), "glimpse": seen.hexdigest()}


@dataclass(frozen=True)
class Documents:
    """The documents of some inputs, in order.

    Args:
        sources: see `find_sources`.
        separator: plain text: the separator between documents of a file, together with a line break right
            after it; None: each file is one document.
        text_field: jsonl, parquet and datasets: the field that contains the text.
        dataset_split: datasets: the split.
        dataset_config: Hub datasets: the configuration.

    Raises:
        ValueError: the separator is empty, or an input is given twice and its documents would count twice.

    """

    sources: Sequence[Source]
    separator: str | None = None
    text_field: str = "text"
    dataset_split: str = "train"
    dataset_config: str | None = None

    def __post_init__(self) -> None:
        if self.separator == "":
            raise ValueError("the separator is empty; give the text between documents, or omit it")
        for names in self._inputs().values():
            if len(names) > 1:
                others = ", ".join(dict.fromkeys(names[1:]))
                also = "" if others == names[0] else f" (as {others})"
                raise ValueError(f"{names[0]} is given {len(names)} times{also}; give each input once")

    def _inputs(self) -> dict[tuple[Any, ...], list[str]]:
        """Return the names of each input by its identity; links to the same file are identical."""
        found: dict[tuple[Any, ...], list[str]] = {}
        for source in self.sources:
            key: tuple[Any, ...] = (source.name,)
            if source.path is not None:
                status = source.path.stat()
                key = (status.st_dev, status.st_ino) if status.st_ino else (str(source.path.resolve()),)
            if source.format == "dataset":
                key += (self.dataset_split, self.dataset_config or "")
            found.setdefault(key, []).append(source.name)
        return found

    def require_apart(self, held_out: Documents) -> None:
        """Reject inputs that are both trained on and held out: the same files, links to them, or copies.

        Raises:
            ValueError: names them.

        """
        ours, theirs = self._inputs(), held_out._inputs()
        both = sorted({" = ".join(dict.fromkeys(ours[key] + theirs[key])) for key in ours.keys() & theirs})
        if not both:
            both = sorted(_copies(self.sources, held_out.sources))
        if both:
            raise ValueError(
                f"{', '.join(both)}: used for both training and validation; hold out other inputs, or a "
                "fraction of these by --validation-fraction"
            )

    def pieces(self, progress: Callable[[float], None] = lambda share: None) -> Iterator[Piece]:
        """Iterate over the text of all inputs; `progress` is called with the fraction read, from 0 to 1.

        Documents without text are skipped.

        Raises:
            ValueError: a file cannot be read in its format; names the file and position.

        """
        sizes = [_size(source) for source in self.sources]
        total, before = sum(sizes) or 1, 0
        for source, size in zip(self.sources, sizes, strict=True):

            def report(share: float, before: int = before, size: int = size) -> None:
                progress((before + size * share) / total)

            yield from with_text(self._read(source, report))
            before += size
            progress(before / total)

    def _read(self, source: Source, report: Callable[[float], None]) -> Iterator[Piece]:
        if source.format == "dataset":
            return whole(self._rows_of_dataset(source, report))
        assert source.path is not None
        if source.format == "parquet":
            return whole(_rows_of_parquet(source.path, self.text_field, report))
        if source.format == "jsonl":
            return whole(_rows_of_jsonl(source.path, self.text_field, report))
        return cut(_blocks(source.path, report), self.separator)

    def _rows_of_dataset(self, source: Source, report: Callable[[float], None]) -> Iterator[str]:
        dataset = load_dataset(
            source.name, split=self.dataset_split, config=self.dataset_config, streaming=False
        )
        if self.text_field not in dataset.column_names:
            raise ValueError(
                f"dataset {source.name} has no field {self.text_field!r}; it has "
                f"{', '.join(dataset.column_names)}; select one by --text-field"
            )
        for number, text in enumerate(dataset[self.text_field]):
            yield _text(text, f"row {number} of {source.name}", self.text_field)
            if number % 1000 == 0:
                report(number / len(dataset))


def find_sources(inputs: Sequence[str], *, format: Format = "auto") -> list[Source]:
    """Find the inputs: files, all files of a directory sorted by name, or datasets.

    Args:
        inputs: paths; with format ``dataset``, directories or Hub names.
        format: ``auto`` selects it by the suffix before a compression suffix (``.xz .gz .bz2 .zst``).

    Raises:
        ValueError: an input does not exist or has an unknown format; lists the known ones.

    """
    if format not in get_args(Format):
        raise ValueError(f"format {format!r} is unknown; use {', '.join(get_args(Format))}")
    found = []
    for name in inputs:
        path = Path(name)
        if format == "dataset" or (format == "auto" and _is_dataset(path)):
            found.append(Source(name, path if path.exists() else None, "dataset"))
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            if format == "auto":
                inside = [file for file in inside if _format_of(file) is not None]
            if not inside:
                raise ValueError(
                    f"directory {path} contains no file with a suffix of {_known()}; give its files"
                )
            found += [Source(str(file), file, _format(file, format)) for file in inside]
        elif path.is_file():
            found.append(Source(name, path, _format(path, format)))
        else:
            raise ValueError(
                f"there is no file or directory {path}; check the path (Hub datasets need --format dataset)"
            )
    if not found:
        raise ValueError("no inputs; give files, directories or a dataset")
    return found


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
        if _is_dataset(Path(name)):
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise ValueError(f"it has no split {split!r}; available: {', '.join(map(str, loaded))}")
                loaded = loaded[split]
            return loaded.to_iterable_dataset() if streaming else loaded
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the package raises whatever reading and downloading raise
        raise ValueError(f"dataset {name} cannot be opened: {error}") from error


def _is_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _format_of(path: Path) -> Format | None:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _format(path: Path, asked: Format) -> Format:
    found = _format_of(path) if asked == "auto" else asked
    if found is None:
        raise ValueError(
            f"cannot determine the format of {path} from its name; known suffixes: {_known()}; "
            "set --format text, jsonl or parquet"
        )
    return found


def _known() -> str:
    return f"{' '.join(_SUFFIXES)} (also with {' '.join(_COMPRESSED)})"


def _glimpses(path: Path) -> Iterator[bytes]:
    """Yield the beginning, middle and end of a file; for a short file, all of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in sorted({0, max(0, (size - _GLIMPSE) // 2), max(0, size - _GLIMPSE)}):
            file.seek(start)
            yield file.read(_GLIMPSE)


def _copies(sources: Sequence[Source], others: Sequence[Source]) -> Iterator[str]:
    """Yield the files among some inputs whose content equals that of a file among the others."""

    def by_size(given: Sequence[Source]) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for source in given:
            if source.path is not None and source.path.is_file() and source.path.stat().st_size:
                found.setdefault(source.path.stat().st_size, []).append(source.path)
        return found

    ours, theirs = by_size(sources), by_size(others)
    for size in ours.keys() & theirs:
        for path in ours[size]:
            for other in theirs[size]:
                if list(_glimpses(path)) == list(_glimpses(other)) and sha256_of(path) == sha256_of(other):
                    yield f"{path} = {other}"


def _size(source: Source) -> int:
    return source.path.stat().st_size if source.path is not None and source.path.is_file() else 1


# ------------------------------------------------------------------------------------------ text


def _blocks(path: Path, report: Callable[[float], None]) -> Iterator[str]:
    """Yield decompressed text in blocks, with line ends normalized to line feeds."""
    with _opened(path, report) as file:
        try:
            while block := file.read(_BLOCK):
                yield block
        except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise _unreadable(path, error) from error


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


# ------------------------------------------------------------------------------------------ rows


def _rows_of_jsonl(path: Path, field: str, report: Callable[[float], None]) -> Iterator[str]:
    with _opened(path, report) as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    why = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON ({error})"
                    raise ValueError(
                        f"line {number} of {path} is {why}; jsonl has one object per line"
                    ) from error
                if not isinstance(row, dict) or field not in row:
                    has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                    raise ValueError(
                        f"line {number} of {path} has no field {field!r}, only {has}; "
                        "select the text field by --text-field"
                    )
                yield _text(row[field], f"line {number} of {path}", field)
        except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise _unreadable(path, error, f" after line {number}") from error


def _rows_of_parquet(path: Path, field: str, report: Callable[[float], None]) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise _needs_pyarrow(path) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise ValueError(
                    f"{path} has no column {field!r}, only {', '.join(names)}; select the text column by "
                    "--text-field"
                )
            number, rows = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield _text(text, f"row {number} of {path}", field)
                    number += 1
                report(number / rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{field!r} in {where} is {type(value).__name__}, not text; set another --text-field"
        )
    text: str = value
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON allows
        text = text.encode("utf-8", "replace").decode("utf-8")
    return text


def _unreadable(path: Path, error: BaseException, where: str = "") -> ValueError:
    if isinstance(error, UnicodeDecodeError):
        return ValueError(f"{path} is not UTF-8{where} ({error}); convert it first, for example by iconv")
    return ValueError(
        f"{path} cannot be read{where} ({error}): truncated or of another format; copy it again"
    )


def _needs_pyarrow(path: Path) -> ValueError:
    return ValueError(f"reading {path.name} needs the package pyarrow; install it by {install_extra('data')}")
