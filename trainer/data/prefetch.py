"""Batches prepared in the background while a step runs: the same ones, in the same order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.data.source import Batch, DataSource, take

_Range = tuple[int, int]


class Prefetcher:
    """Asks a source for the batches that are likely next, in threads; what is given is what was asked for.

    A batch is named by its positions, so a wrong guess (the batch size changed with the phase, or a callback
    jumped) costs time and nothing else.

    Args:
        source: asked by one thread at a time, unless it is `concurrent`.
        workers: threads; 0 asks the source directly.
        pin: put batches into page-locked memory, from which a GPU copies while it computes.

    """

    def __init__(self, source: DataSource, *, workers: int = 1, pin: bool = False) -> None:
        self.source, self._pin = source, pin
        self._workers = min(workers, 1) if not source.concurrent else workers
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: OrderedDict[_Range, Future[Batch]] = OrderedDict()

    @property
    def depth(self) -> int:
        """How many batches beyond the one asked for are worth naming."""
        return self._workers + 1 if self._workers else 0

    def batch(self, position: int, count: int, *, following: Sequence[_Range] = ()) -> Batch:
        """Give the batch at positions [position, position + count), and begin with the following ones.

        Raises:
            ValueError: as the source, and only for the batch that is asked for.

        """
        if not self._workers:
            return self._load(position, count)
        wanted = [(position, count), *following]
        for named in [named for named in self._waiting if named not in wanted]:
            self._waiting.pop(named).cancel()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="loader")
        for named in wanted:
            if named not in self._waiting:
                self._waiting[named] = self._pool.submit(self._load, *named)
        return self._waiting.pop((position, count)).result()

    def close(self) -> None:
        """End the threads, once they have finished what they are at."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _load(self, position: int, count: int) -> Batch:
        batch = take(self.source, position, count)
        return batch.pin_memory() if self._pin else batch
