"""Parts of error messages: the nearest known name, and the list of known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from implicit_blocks._utils.synonyms import SYNONYMS

MOST_LISTED = 24
"""The maximum number of names in a message; of longer lists it shows the nearest or the first ones."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'picard'? Known: anderson, picard``, without the question if no name is similar.

    Of more than `MOST_LISTED` names the message has only the nearest or, if none is similar, the first ones.
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
    """Return the known name that this one stands for in other libraries, or the most similar one, or None."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    if len(name) > 200:  # the comparison takes quadratic time
        return None
    if (same := next((one for one in synonyms(name) if one in by_folded), None)) is not None:
        return by_folded[same]
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def synonyms(name: str) -> tuple[str, ...]:
    """Return our names for what other libraries call this: ``("learning_rate",)`` for ``lr``."""
    return SYNONYMS.get(name.casefold().replace("-", "_"), ())


def without_torch(error: ImportError) -> str:
    """Return the message for an import that failed because torch is missing.

    Raises:
        ImportError: the import failed for another reason, which is a bug.

    """
    if error.name != "torch":
        raise error
    return (
        "torch is not installed; pip install torch (on Linux this installs CUDA as well; use PyTorch's own "
        "package index for the CPU-only version)"
    )
