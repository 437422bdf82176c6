"""Conversations packed whole into rows of tokens, with the tokens that are scored. Imports no torch.

A row of length L holds one or more complete conversations: one with n tokens takes n - 1 places, with the
inputs ``tokens[:-1]`` and the next tokens ``tokens[1:]``, of which the answers are scored. Rows are filled by
best fit decreasing: D. Johnson, "Near-optimal bin packing algorithms", 1973. The rest of a row is padding,
which is not scored and is a document of its own.

A conversation of more than L + 1 tokens keeps its first L + 1; it is left out if no answer remains.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.data.token_folder import TokenFolder

Scoring = Literal["answers", "all"]
Ints = npt.NDArray[np.int64]


class ChatRows:
    """The conversations of a folder, assigned to rows.

    Args:
        files: tokens with document ends and targets.
        length: L, number of input tokens per row.
        packing: put several conversations into a row; False: one in each.
        scoring: ``"answers"``: only targets are scored; ``"all"``: all but the first token of a conversation.

    Raises:
        ValueError: the folder has no targets, or no conversation has one within L + 1 tokens.

    """

    def __init__(self, files: TokenFolder, *, length: int, packing: bool, scoring: Scoring) -> None:
        if files.documents is None or not files.has_targets:
            raise ValueError(
                f"{files.path} has no record of which tokens are answers; write conversations by python -m "
                "trainer.tokenize --chat, or read it with data.kind=tokens"
            )
        ends = files.document_ends
        starts = np.concatenate([[0], ends[:-1]])
        self.conversations = len(ends)
        self.truncated = int(np.count_nonzero(ends - starts > length + 1))
        stops = np.minimum(ends, starts + length + 1)
        kept = np.flatnonzero((stops - starts > 1) & (_scored(files, starts, stops) > 0))
        self.dropped = self.conversations - len(kept)
        if not len(kept):
            raise ValueError(
                f"none of the {self.conversations} conversations in {files.path} has an answer within "
                f"{length} tokens, so no token would have a label; increase data.seq_len"
            )
        self.files, self.length, self._scoring = files, length, scoring
        self._starts, self._stops = starts[kept], stops[kept]
        sizes = self._stops - self._starts - 1
        rows = pack(sizes, length) if packing else [[number] for number in range(len(sizes))]
        self._members = np.array([number for row in rows for number in row], dtype=np.int64)
        self._ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        self.filled = float(sizes.sum() / (len(rows) * length))
        """Share of the places that are no padding."""

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, index: int, *, vocab_size: int | None) -> tuple[Ints, Ints, npt.NDArray[np.bool_], Ints]:
        """Return the inputs, next tokens, which of these are scored, and documents of a row, each (L,).

        Raises:
            ValueError: an ID is outside the vocabulary.

        """
        inputs, following = np.zeros((2, self.length), dtype=np.int64)
        scored = np.zeros(self.length, dtype=np.bool_)
        members = self._members[self._ends[index - 1] if index else 0 : self._ends[index]]
        documents = np.full(self.length, len(members), dtype=np.int64)
        place = 0
        for number, member in enumerate(members):
            start, stop = int(self._starts[member]), int(self._stops[member])
            tokens = self.files.read(start, stop, vocab_size=vocab_size)
            here = slice(place, place + len(tokens) - 1)
            inputs[here], following[here], documents[here] = tokens[:-1], tokens[1:], number
            scored[here] = self._scoring == "all" or self.files.read_targets(start + 1, stop)
            place = here.stop
        return inputs, following, scored, documents


def pack(sizes: Ints, capacity: int) -> list[list[int]]:
    """Assign items to rows by best fit decreasing; every size is at most the capacity.

    Returns:
        The indices of the items of each row. The result depends only on the arguments.

    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # the free places of each row that has any, and the row, sorted
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(room, (size, -1))
        left, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        if left > size:
            insort(room, (left - size, row))
    return rows


def _scored(files: TokenFolder, starts: Ints, stops: Ints) -> Ints:
    """Return the number of targets after the first token of each conversation."""
    counts, block = np.zeros(len(starts), dtype=np.int64), 1 << 16
    for first in range(0, len(starts), block):
        begin, end = int(starts[first]), int(stops[first : first + block][-1])
        before = np.concatenate([[0], np.cumsum(files.read_targets(begin, end), dtype=np.int64)])
        inner = slice(first, first + block)
        counts[inner] = (
            before[stops[inner] - begin] - before[np.minimum(starts[inner] + 1, stops[inner]) - begin]
        )
    return counts
