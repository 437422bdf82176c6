"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any


class Display:
    """Shows the progress of a run. This base class shows nothing, for all ranks but rank 0."""

    def start(self, *, step: int, total: int) -> None:
        """Start at ``step`` of ``total``."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the row of metrics of a finished step."""

    def log(self, text: str) -> None:
        """Print a message of one or more lines."""

    def doing(self, text: str) -> None:
        """Show an activity between two steps, such as saving."""

    def close(self) -> None:
        """Restore the terminal."""


def duration(seconds: float) -> str:
    """Format a time as ``45s``, ``3m05s`` or ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def counted(number: int, what: str) -> str:
    """Format a number with its noun: ``1 document``, ``2,000 documents``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def magnitude(value: float) -> str:
    """Format a count as ``950``, ``12.3k`` or ``4.5M``."""
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if value < limit:
            return f"{value / divisor:.0f}" if suffix == "" else f"{value / divisor:.1f}{suffix}"
    return f"{value / 1e12:.1f}T"


def format_row(row: Mapping[str, Any], *, accuracy: bool) -> str:
    """Format the metrics of a step: loss, accuracy, search (if the model has one), rates."""
    parts = [f"loss {row['loss']:.4f}"]
    if accuracy:
        parts.append(f"acc {row['accuracy']:.1%}")
    if row.get("iterations") is not None:
        parts.append(f"iter {row['iterations']:.1f}/{row['iterations_max']}")
        residual = row["residual"]  # None: not finite
        parts.append("res non-finite" if residual is None else f"res {residual:.1e}")
        if row["non_converged"]:
            parts.append(f"unconverged {row['non_converged']:.0%}")
        if row["diverged"]:
            parts.append(f"diverged {row['diverged']:.0%}")
    if row.get("adjoint_non_converged"):
        parts.append(f"adjoint unconverged {row['adjoint_non_converged']:.0%}")
    parts += [f"|g| {row['gradient_norm']:.2f}", f"lr {row['learning_rate']:.1e}"]
    parts.append(f"{magnitude(row['tokens_per_second'])} tok/s")
    if row.get("mfu") is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    return "  ".join(parts)


PLAIN_LINES = 20
"""Progress lines of a run without a terminal; runs of more than as many minutes print one a minute."""
SILENCE = 20.0
"""Seconds without a line after which plain lines name the activity that begins."""
_RECENT_STEPS = 50
"""Number of latest steps that the ETA is based on, because phases differ in pace."""


class Pace:
    """Estimates the remaining time from the latest steps, including what happens between them."""

    def __init__(self, *, total: int) -> None:
        self._total = total
        self._ends: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS + 1)
        """Steps and the times at which they ended."""

    def remaining(self, row: Mapping[str, Any]) -> float:
        """Return the remaining seconds after ``row``, the row of the latest step."""
        step, now = int(row["step"]), float(row["seconds"])
        self._ends.append((step, now))
        first, then = self._ends[0]
        # The first step of a process compiles and warms up: it counts only while it is the only one.
        pace = (now - then) / (step - first) if step > first else float(row["step_seconds"])
        return pace * (self._total - step)


class PlainDisplay(Display):
    """Prints lines for logs and pipes, at multiples of ``log_every`` steps.

    A run prints about `PLAIN_LINES` of them, and more if its steps take so long that a minute passes between.
    """

    def __init__(self, *, log_every: int, accuracy: bool) -> None:
        self._log_every = log_every
        self._accuracy = accuracy
        self._total = 0
        self._often = log_every
        self._printed = 0.0
        """The time of the last line, in seconds of the run."""
        self._last_line = time.monotonic()
        self._pace: Pace | None = None

    def start(self, *, step: int, total: int) -> None:
        """Start at ``step`` of ``total``."""
        self._total = total
        self._often = self._log_every * max(1, -(-total // (self._log_every * PLAIN_LINES)))
        self._pace = Pace(total=total)

    def step(self, row: Mapping[str, Any]) -> None:
        """Print the row if it is time for a line, and if its step is the first or the last."""
        assert self._pace is not None
        remaining = self._pace.remaining(row)
        step, seconds = row["step"], float(row["seconds"])
        waited = step % self._log_every == 0 and seconds - self._printed >= 60.0
        if not waited and step % self._often and step not in (1, self._total):
            return
        self._printed = seconds
        width = len(str(self._total))
        self.log(
            f"{row['step']:>{width}}/{self._total}  {row['phase']}  "
            f"{format_row(row, accuracy=self._accuracy)}  ETA {duration(remaining)}"
        )

    def doing(self, text: str) -> None:
        """Print an activity if the last line is old, as in an evaluation of several sets."""
        if time.monotonic() - self._last_line >= SILENCE:
            self.log(text)

    def log(self, text: str) -> None:
        """Print a message."""
        print(text, flush=True)
        self._last_line = time.monotonic()


class RichDisplay(Display):
    """Shows a live bar on a terminal, with the latest metrics in a line below it."""

    def __init__(self, *, accuracy: bool) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._accuracy = accuracy
        self._progress = Progress(
            TextColumn("[bold]{task.fields[phase]}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        self._task = self._progress.add_task("train", total=None, phase="", eta="")
        self._live = Live(console=Console(), refresh_per_second=4)
        self._show("")
        self._pace: Pace | None = None

    def _show(self, note: str) -> None:
        from rich.console import Group
        from rich.text import Text

        self._live.update(Group(self._progress, Text(note, no_wrap=True, overflow="ellipsis")))

    def start(self, *, step: int, total: int) -> None:
        """Start at ``step`` of ``total``."""
        self._pace = Pace(total=total)
        self._progress.update(self._task, completed=step, total=total)
        self._live.start()

    def step(self, row: Mapping[str, Any]) -> None:
        """Move the bar and show the row."""
        assert self._pace is not None
        remaining = self._pace.remaining(row)
        self._progress.update(
            self._task, completed=row["step"], phase=row["phase"], eta=f"ETA {duration(remaining)}"
        )
        self._show(format_row(row, accuracy=self._accuracy))

    def log(self, text: str) -> None:
        """Print a message above the bar."""
        # soft_wrap keeps long paths on one line, so that they can be copied.
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def doing(self, text: str) -> None:
        """Show an activity below the bar."""
        self._show(text)

    def close(self) -> None:
        """Stop the bar and leave its last state on the screen."""
        self._live.stop()


def make_display(*, log_every: int, accuracy: bool) -> Display:
    """Return a live display if standard output is a terminal and rich is installed, else plain lines."""
    if sys.stdout.isatty():
        try:
            return RichDisplay(accuracy=accuracy)
        except ImportError:
            pass  # rich comes with the extra `train`; plain lines show the same
    return PlainDisplay(log_every=log_every, accuracy=accuracy)
