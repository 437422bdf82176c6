"""Documents from plain text, jsonl, parquet and Hugging Face datasets, optionally compressed.

Text is read in pieces of bounded size, see `trainer.data.tokenizing.pieces`. A conversation is one piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.data.tokenizing.fields import Conversations, Fields, TextField
from trainer.data.tokenizing.pieces import Piece, cut, whole, with_text
from trainer.data.tokenizing.reading import (
    blocks_of_text,
    is_dataset,
    rows_of_dataset,
    rows_of_jsonl,
    rows_of_parquet,
)
from trainer.storage.files import sha256_of

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
        chat: read conversations, see `trainer.data.tokenizing.fields.Conversations`; each is one document.

    Raises:
        ValueError: the separator is empty, an input is given twice and its documents would count twice, or
            conversations are to be read from plain text.

    """

    sources: Sequence[Source]
    separator: str | None = None
    text_field: str = "text"
    dataset_split: str = "train"
    dataset_config: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        for source in self.sources if self.chat else ():
            if source.format == "text":
                raise ValueError(
                    f"{source.name} is plain text, which has no roles; conversations are rows of jsonl, "
                    "parquet or datasets with messages, or with prompt and completion"
                )
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
        if source.format == "text":
            assert source.path is not None
            return cut(blocks_of_text(source.path, report), self.separator)
        fields: Fields = Conversations() if self.chat else TextField(self.text_field)
        if source.format == "dataset":
            rows = rows_of_dataset(
                source.name, fields.select, report, split=self.dataset_split, config=self.dataset_config
            )
        else:
            assert source.path is not None
            read = rows_of_parquet if source.format == "parquet" else rows_of_jsonl
            rows = read(source.path, fields.select, report)
        return whole((fields.read(row, place), place) for place, row in rows)


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
        if format == "dataset" or (format == "auto" and is_dataset(path)):
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


def _format_of(path: Path) -> Format | None:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _format(path: Path, wanted: Format) -> Format:
    found = _format_of(path) if wanted == "auto" else wanted
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

    def by_size(group: Sequence[Source]) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for source in group:
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
