"""When the prompts of waiting texts are solved: those that wait for a short time are solved together."""

from __future__ import annotations

LONGEST = 8.0
"""The longest wait of a text, as a multiple of the mean time that prompts take."""


class Admission:
    """Decides when waiting texts enter free slots.

    Solving prompts stops all texts that are running, for a time that depends little on the number of prompts.
    Prompts therefore wait until their idle slots have lost as much time as the running texts will lose: of
    all rules that do not know when the next text arrives, it loses least in the worst case, twice the time
    of the best decision.

    Args:
        max_seconds: the longest time that a text waits in this way; 0: texts enter at once.

    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._seconds = 0.0
        """The mean time that prompts take."""
        self._since: tuple[float, float, float] | None = None
        """When texts began to wait, when they were counted last, and the seconds that slots have lost."""

    def took(self, seconds: float) -> None:
        """Count the time that prompts have taken."""
        self._seconds += 0.5 * (seconds - self._seconds)

    def is_due(self, now: float, *, waiting: int, free: int, running: int) -> bool:
        """Whether waiting texts enter now, given the numbers of texts and of free slots."""
        ready = min(waiting, free)
        first, before, lost = self._since or (now, now, 0.0)
        lost += ready * (now - before)
        longest = min(self.max_seconds, LONGEST * self._seconds)
        due = not running or lost >= running * self._seconds or now - first >= longest
        self._since = (first, now, lost) if ready and not due else None
        return ready > 0 and due
