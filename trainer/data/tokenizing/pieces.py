"""Documents in pieces of bounded size, so that files of any length take constant memory.

A piece ends with its document, or at the first line end after `PIECE` characters, so the pieces of a document
depend only on its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PIECE = 1 << 20
"""Number of characters after which a piece ends at the next line end."""


class Piece(NamedTuple):
    """A part of a document; `begins` and `ends` mark the document's first and last piece."""

    text: str
    begins: bool
    ends: bool
    place: str = ""
    """The row that contains the document, such as ``line 3 of chat.jsonl``; empty for plain text."""


def cut(blocks: Iterator[str], separator: str | None) -> Iterator[Piece]:
    """Split text at separators into documents, in pieces; blocks may end within a separator."""
    rest, begins = "", True
    # A block may end within a separator, or before the line break after it.
    width = 0 if separator is None else len(separator)
    for block in blocks:
        rest += block
        while separator is not None and (at := rest.find(separator, 0, len(rest) - 1)) >= 0:
            yield from _pieces(rest[:at], begins=begins, ends=True)
            begins, rest = True, rest[at + width :]
            rest = rest[1:] if rest.startswith("\n") else rest
        if len(rest) > 2 * PIECE + width:
            cut = _line_end(rest, PIECE, len(rest) - width)
            if cut is not None:
                yield from _pieces(rest[:cut], begins=begins, ends=False)
                begins, rest = False, rest[cut:]
    for number, text in enumerate([rest] if separator is None else rest.split(separator)):
        text = text[1:] if number and text.startswith("\n") else text
        yield from _pieces(text, begins=begins, ends=True)
        begins = True


def _pieces(text: str, *, begins: bool, ends: bool, place: str = "") -> Iterator[Piece]:
    """Split text so that every piece but the last ends at the first line end after PIECE characters."""
    start = 0
    while (cut := _line_end(text, start + PIECE, len(text) - 1)) is not None:
        yield Piece(text[start:cut], begins, False, place)
        start, begins = cut, False
    yield Piece(text[start:], begins, ends, place)


def _line_end(text: str, start: int, stop: int) -> int | None:
    """Return the end of the first line that ends between `start` and `stop`, or None."""
    at = text.find("\n", start, stop)
    return None if at < 0 else at + 1


def whole(texts: Iterator[tuple[str, str]]) -> Iterator[Piece]:
    """Yield complete documents in pieces, from their texts and places."""
    for text, place in texts:
        yield from _pieces(text, begins=True, ends=True, place=place)


def with_text(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Drop documents that consist only of white space, if they are a single piece."""
    return (piece for piece in pieces if not (piece.begins and piece.ends) or piece.text.strip())
