"""Words for error messages: the nearest known name, and the list of them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'picard'? Known: anderson, picard``, or without the question where nothing is near."""
    names = sorted(known)
    near = nearest(name, names)
    question = f"did you mean {near!r}? " if near else ""
    return f"{question}Known: {', '.join(names) or 'none'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like this one, if any is."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None
