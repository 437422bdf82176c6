"""Progress of the tokenization: a live bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self, TextIO

from trainer.reporting.display import duration, magnitude

_EVERY = 10.0  # seconds between lines where no terminal shows a bar


class TokenizationProgress:
    """Shows the fraction of the inputs read, documents, tokens, throughput and the remaining time.

    Args:
        stream: output stream; a bar needs a terminal and the package rich, otherwise plain lines are printed.

    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = time.perf_counter()
        self._first: tuple[float, float, int] | None = None
        self._last = 0.0, 0
        self._last_line = self._began
        self._bar, self._task = _bar(stream)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def log(self, text: str) -> None:
        """Print a message."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def report(self, share: float, documents: int, tokens: int) -> None:
        """Update the progress."""
        now = time.perf_counter()
        if self._first is None or share < self._last[0] or tokens < self._last[1]:
            # Exclude resumed shards, tokenizer training and earlier splits from the throughput.
            self._first = now, share, tokens
        self._last = share, tokens
        began, before, tokens_before = self._first
        left = (now - began) / (share - before) * (1 - share) if share > before else None
        rate = (tokens - tokens_before) / (now - began) if now > began else 0.0
        text = f"{magnitude(documents)} documents  {magnitude(tokens)} tokens  {magnitude(rate)} tok/s"
        text += "" if left is None else f"  ETA {duration(left)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=share, text=text)
        elif now - self._last_line >= _EVERY:
            self._last_line = now
            print(f"{share:6.1%}  {text}", file=self._stream, flush=True)


def _bar(stream: TextIO) -> tuple[Any, Any]:
    if not stream.isatty():
        return None, None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError:  # rich comes with the `train` extra
        return None, None
    bar = Bar(BarColumn(bar_width=40), TaskProgressColumn(), TextColumn("{task.fields[text]}"),
              console=Console(file=stream), refresh_per_second=4)  # fmt: skip
    return bar, bar.add_task("tokenize", total=1.0, text="")
