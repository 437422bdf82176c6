"""Documents in pieces of bounded size, so that a book or a file of any length takes constant memory.

A piece ends with its document, or else at the first line's end after `PIECE` characters: how a document is
cut depends on its text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PIECE = 1 << 20
"""Characters from which on a piece ends at the next line's end."""


class Piece(NamedTuple):
    """A part of a document; `begins` and `ends` say whether it is the document's first and last."""

    text: str
    begins: bool
    ends: bool


def cut(blocks: Iterator[str], separator: str | None) -> Iterator[Piece]:
    """Documents between separators, in pieces; blocks may end anywhere, within a separator too."""
    rest, begins = "", True
    # A separator may be cut by a block's end, and so may the line break that goes with it.
    held = 0 if separator is None else len(separator)
    for block in blocks:
        rest += block
        while separator is not None and (at := rest.find(separator, 0, len(rest) - 1)) >= 0:
            yield from _pieces(rest[:at], begins=begins, ends=True)
            begins, rest = True, rest[at + held :]
            rest = rest[1:] if rest.startswith("\n") else rest
        if len(rest) > 2 * PIECE + held:
            cut = _line_end(rest, PIECE, len(rest) - held)
            if cut is not None:
                yield from _pieces(rest[:cut], begins=begins, ends=False)
                begins, rest = False, rest[cut:]
    for number, text in enumerate([rest] if separator is None else rest.split(separator)):
        text = text[1:] if number and text.startswith("\n") else text
        yield from _pieces(text, begins=begins, ends=True)
        begins = True


def _pieces(text: str, *, begins: bool, ends: bool) -> Iterator[Piece]:
    """Cut text so that every piece but the last ends at the first line's end from PIECE characters on."""
    start = 0
    while (cut := _line_end(text, start + PIECE, len(text) - 1)) is not None:
        yield Piece(text[start:cut], begins, False)
        start, begins = cut, False
    yield Piece(text[start:], begins, ends)


def _line_end(text: str, start: int, stop: int) -> int | None:
    """Where the first line from `start` on is over, before `stop`."""
    at = text.find("\n", start, stop)
    return None if at < 0 else at + 1


def whole(texts: Iterator[str]) -> Iterator[Piece]:
    """Give texts that are documents in pieces."""
    for text in texts:
        yield from _pieces(text, begins=True, ends=True)


def with_text(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Leave out documents of nothing but white space, as long as one piece shows it."""
    return (piece for piece in pieces if not (piece.begins and piece.ends) or piece.text.strip())
