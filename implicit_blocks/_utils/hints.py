"""Words for error messages: the nearest known name, and the list of them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_LISTED = 24
"""Most names that a message lists; of more, only the nearest or the first ones."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say ``did you mean 'picard'? Known: anderson, picard``, without the question where nothing is near.

    Of more than `MOST_LISTED` names only the nearest is named or, where nothing is near, the first ones.
    """
    names = sorted(known)
    near = nearest(name, names)
    if len(names) > MOST_LISTED:
        if near:
            return f"did you mean {near!r}?"
        return f"known: {', '.join(names[:MOST_LISTED])} and {len(names) - MOST_LISTED} more"
    listed = ", ".join(names) or "none"
    return f"did you mean {near!r}? Known: {listed}" if near else f"known: {listed}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name most like this one, if any is."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    if len(name) > 200:  # comparing takes time by its square
        return None
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def without_torch(error: ImportError) -> str:
    """Say that torch is missing, if that is what an import failed by.

    Raises:
        ImportError: it failed by something else, which is a mistake in the program.

    """
    if error.name != "torch":
        raise error
    return (
        "torch is not installed; pip install torch (on Linux that brings CUDA along: for CPUs alone "
        "take PyTorch's own index of those)"
    )
