"""Stop strings in a text that grows by pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Finds the first of several strings in a text, wherever its pieces are divided.

    The text before the string that is complete first is released; of two that are complete at the same
    character, the one that began first counts. What may be the beginning of a string is withheld until more
    of the text is known, so that no part of a stop string is released.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self._withheld = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Append a piece; return the text released, and whether a stop string was found."""
        if not self.stops:
            return text, False
        whole = self._withheld + text
        places = [(start + len(stop), start) for stop in self.stops if (start := whole.find(stop)) >= 0]
        if places:
            self._withheld = ""
            return whole[: min(places)[1]], True
        size = max(_overlap(whole, stop) for stop in self.stops)
        released = whole[: len(whole) - size]
        self._withheld = whole[len(whole) - size :]
        return released, False

    def finish(self) -> str:
        """Return what was withheld, at the end of the text."""
        text, self._withheld = self._withheld, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``stop``, without all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
