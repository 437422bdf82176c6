"""Prefetching of batches in background threads; batches and their order do not change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.data.source import Batch, DataSource, take

_Range = tuple[int, int]


class Prefetcher:
    """Loads the batches that are likely requested next in background threads.

    A batch is identified by its positions, so a wrong prediction (the batch size changed with the phase, or a
    callback changed the position) costs only time.

    Args:
        source: the data source; used by one thread at a time unless it is `concurrent`.
        workers: number of threads; 0 disables prefetching.
        pin: put batches into page-locked memory, which allows asynchronous copies to a GPU.

    """

    def __init__(self, source: DataSource, *, workers: int = 1, pin: bool = False) -> None:
        self.source, self._pin = source, pin
        self._workers = min(workers, 1) if not source.concurrent else workers
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: OrderedDict[_Range, Future[Batch]] = OrderedDict()

    @property
    def depth(self) -> int:
        """Number of batches worth prefetching beyond the requested one."""
        return self._workers + 1 if self._workers else 0

    def batch(self, position: int, count: int, *, following: Sequence[_Range] = ()) -> Batch:
        """Return the batch at positions [position, position + count) and start loading the following ones.

        Raises:
            ValueError: as the source, and only for the requested batch.

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
        """Stop the threads after their current batch."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _load(self, position: int, count: int) -> Batch:
        batch = take(self.source, position, count)
        return batch.pin_memory() if self._pin else batch
