"""Train and validation splits: by document, or at a position of a single document."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from trainer.data.manifest import TRAIN, VALIDATION
from trainer.data.tokenizing.documents import Documents
from trainer.data.tokenizing.pieces import Piece

MAX_SEED = 2**64 - 1

_GAP = "gap"
_BOUNDARIES = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s+"))
"""Ends of paragraphs, lines and words, in order of preference for a cut."""


class Split(Protocol):
    """Assigns every piece of text to a side."""

    def assign(self, pieces: Iterator[Piece]) -> Iterator[tuple[str, Piece]]:
        """Yield each piece with its side, `TRAIN` or `VALIDATION`; a piece may be split in two."""


@dataclass(frozen=True)
class OneSide:
    """Assigns all text to one side."""

    side: str

    def assign(self, pieces: Iterator[Piece]) -> Iterator[tuple[str, Piece]]:
        """See `Split.assign`."""
        return ((self.side, piece) for piece in pieces)


@dataclass(frozen=True)
class ByDocument:
    """Holds out whole documents, selected by a keyed hash of the text of their first piece.

    Exact copies of a document are therefore on the same side.
    """

    fraction: float
    seed: int

    def assign(self, pieces: Iterator[Piece]) -> Iterator[tuple[str, Piece]]:
        """See `Split.assign`."""
        key, limit, side = self.seed.to_bytes(8, "little"), int(self.fraction * 2**64), TRAIN
        for piece in pieces:
            if piece.begins:
                text = piece.text.encode("utf-8", "surrogatepass")
                chosen = hashlib.blake2b(text, digest_size=8, key=key).digest()
                side = VALIDATION if int.from_bytes(chosen, "little") < limit else TRAIN
            yield side, piece


@dataclass(frozen=True)
class AtPosition:
    """Holds out the end of a single document.

    The document is cut near the position `characters - held_out`, after a paragraph, else after a line or a
    word. Each part ends like a document, and no character is in both. The last `gap` characters before the
    cut are in neither.
    """

    characters: int
    held_out: int
    gap: int = 0

    def assign(self, pieces: Iterator[Piece]) -> Iterator[tuple[str, Piece]]:
        """See `Split.assign`."""
        target, start, begins = self.characters - self.held_out, 0, True
        stop, side = target - self.gap, TRAIN
        for piece in pieces:
            text, end = piece.text, start + len(piece.text)
            if side == TRAIN and end >= stop:  # the end of the training text
                cut = self._cut(piece, stop - start)
                if cut:
                    yield TRAIN, Piece(text[:cut], begins, ends=True)
                text, start, side, begins = text[cut:], start + cut, _GAP, True
            if side == _GAP and end >= target:  # the end of the gap
                cut = self._cut(piece._replace(text=text), target - start) if self.gap else 0
                text, start, side = text[cut:], start + cut, VALIDATION
            if side != _GAP and text:
                yield side, Piece(text, begins, piece.ends)
                begins = False
            start = end

    def _cut(self, piece: Piece, near: int) -> int:
        reach = min(self.held_out // 4, self.gap // 2) if self.gap else self.held_out // 4
        return _boundary(piece.text, near, reach=reach, is_last=piece.ends)


def _boundary(text: str, near: int, *, reach: int, is_last: bool) -> int:
    """Return where to cut a text: the boundary nearest to a position, at most `reach` away."""
    first, last = max(0, near - reach), min(len(text), near + reach)
    # The text after the cut must not be only white space.
    last = min(last, len(text.rstrip()) - 1) if is_last else last
    for boundary in _BOUNDARIES:
        found = [match.end() for match in boundary.finditer(text, first) if match.end() <= last]
        if found:
            return min(found, key=lambda position: abs(position - near))
    return near


def find_split(documents: Documents, *, fraction: float, seed: int, gap: int = 0) -> Split:
    """Select how to hold out a fraction of the documents: by document, or at a position if there is only one.

    Reads the first document.

    Raises:
        ValueError: there is no text, or too little to hold out such a fraction with such a gap; a gap is
            given for several documents; or there is a single conversation, which cannot be cut.

    """
    if not fraction:
        return OneSide(TRAIN)
    characters = 0
    for number, piece in enumerate(documents.pieces()):
        if piece.begins and number:
            if gap:
                raise ValueError(
                    f"the validation gap of {gap} characters has no effect: the inputs are several "
                    "documents, and whole documents are held out; omit it"
                )
            return ByDocument(fraction, seed)
        characters += len(piece.text)
    if documents.chat:
        raise ValueError(
            "the inputs are a single conversation, which cannot be split; give more, or hold out another "
            "file by --validation"
        )
    held_out = round(characters * fraction)
    if not 0 < held_out < characters - gap:
        behind = f" after a gap of {gap}" if gap else ""
        raise ValueError(
            f"the inputs are a single document of {characters} characters, too short to hold out a fraction "
            f"of {fraction:g}{behind}; give more text, or a larger --validation-fraction"
            + (", or a smaller --validation-gap" if gap else "")
        )
    return AtPosition(characters, held_out, gap)


class Repeats:
    """Counts documents whose text (or first piece) equals that of a held-out document."""

    def __init__(self, held_out: Documents) -> None:
        self._known = {_digest(piece) for piece in held_out.pieces() if piece.begins}
        self.count = 0

    def watch(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces unchanged while counting."""
        for piece in pieces:
            self.count += piece.begins and _digest(piece) in self._known
            yield piece


def _digest(piece: Piece) -> bytes:
    text = piece.text.strip().encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


def require_both_sides(documents: dict[str, int]) -> None:
    """Reject a split with an empty side.

    Args:
        documents: number of documents per side.

    Raises:
        ValueError: gives the number of documents and a remedy.

    """
    for side, count in documents.items():
        if not count:
            total = sum(documents.values())
            share = "a larger" if side == VALIDATION else "a smaller"
            raise ValueError(
                f"none of the {total} documents is assigned to {side}, because documents are selected at "
                f"random; hold out inputs by --validation, or give {share} --validation-fraction or "
                "another --seed"
            )
