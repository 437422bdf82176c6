"""Prefetching does not change batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.prefetch import Prefetcher
from trainer.data.source import Batch, DataSource, EvaluationSet, rank_share
from trainer.data.tokens import TokenData, write_tokens


class Slow(DataSource):
    """A slow source that records the thread and the position of each request."""

    vocab_size, length, samples = 10, 2, None

    def __init__(self, seconds: float = 0.0, *, concurrent: bool = False) -> None:
        self.seconds, self.concurrent = seconds, concurrent
        self.asked: list[tuple[int, int]] = []
        self.at_once, self.most_at_once = 0, 0
        self.threads: set[str] = set()

    def batch(self, position: int, count: int) -> Batch:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.threads.add(threading.current_thread().name)
        self.asked.append((position, count))
        time.sleep(self.seconds)
        self.at_once -= 1
        if position == 13:
            raise ValueError("nothing at 13")
        numbers = torch.arange(position, position + count)[:, None].expand(count, 2)
        return Batch(inputs=numbers, labels=numbers)

    def evaluation_sets(self, evaluation: object) -> Mapping[str, EvaluationSet]:
        return {}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_prefetched_batches_equal_direct_ones(workers: int) -> None:
    source = Slow(concurrent=True)
    loader = Prefetcher(source, workers=workers)
    for first in (0, 4, 8, 20, 24):  # 20 was not prefetched
        following = [(first + 4 * ahead, 4) for ahead in range(1, 1 + loader.depth)]
        batch = loader.batch(first, 4, following=following)
        assert batch.inputs[:, 0].tolist() == list(range(first, first + 4))
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    if not workers:
        assert source.threads == {threading.current_thread().name}


def test_loading_overlaps_with_computing() -> None:
    source = Slow(0.02)
    loader = Prefetcher(source, workers=1)
    began = time.perf_counter()
    for step in range(10):
        loader.batch(step, 1, following=[(step + 1, 1), (step + 2, 1)])
        time.sleep(0.02)  # the step
    spent = time.perf_counter() - began
    loader.close()
    assert spent < 0.34  # 0.4 one after the other, 0.22 side by side


def test_only_concurrent_sources_use_several_threads() -> None:
    for concurrent, expected in ((False, 1), (True, 3)):
        source = Slow(0.02, concurrent=concurrent)
        loader = Prefetcher(source, workers=3)
        loader.batch(0, 1, following=[(1, 1), (2, 1), (3, 1)])
        loader.batch(3, 1)
        loader.close()
        assert source.most_at_once == expected


def test_an_error_is_raised_by_the_batch_it_belongs_to() -> None:
    loader = Prefetcher(Slow(), workers=1)
    loader.batch(12, 1, following=[(13, 1)])
    with pytest.raises(ValueError, match="nothing at 13"):
        loader.batch(13, 1, following=[(14, 1)])
    assert loader.batch(14, 1).inputs[0, 0] == 14
    loader.close()


def test_each_remaining_sample_occurs_once_after_changing_ranks_and_workers(tmp_path: Path) -> None:
    """A run on one rank resumes on two, then on four, with other batch sizes and loader threads."""
    tokens = np.arange(4001)
    write_tokens(tmp_path / "a.bin", tokens, vocab_size=5000)
    seen: list[int] = []
    position = 0
    for world_size, workers, batch_size, steps in (
        (1, 0, 20, 3),
        (2, 1, 20, 4),
        (4, 3, 36, 5),
        (3, 1, 20, 4),
    ):
        # Each rank opens its own files, as after a restart.
        loaders = [
            Prefetcher(TokenData(tmp_path / "a.bin", length=10, seed=8), workers=workers)
            for _ in range(world_size)
        ]
        for step in range(steps):
            for rank, loader in enumerate(loaders):
                own, count = rank_share(batch_size, rank=rank, world_size=world_size)
                following = [
                    (position + ahead * batch_size + own, count)
                    for ahead in range(1, 1 + min(loader.depth, steps - step - 1))
                ]
                seen += loader.batch(position + own, count, following=following).inputs[:, 0].tolist()
            position += batch_size
        for loader in loaders:
            loader.close()
    assert position == 400
    assert sorted(seen) == list(range(0, 4000, 10))  # one epoch: each sample exactly once
    whole = TokenData(tmp_path / "a.bin", length=10, seed=8).batch(0, 400).inputs[:, 0].tolist()
    assert seen == whole


@pytest.mark.parametrize(
    ("workers", "concurrent", "depth"),
    [(0, True, 0), (1, True, 2), (3, True, 4), (3, False, 2), (0, False, 0)],
)
def test_prefetching_goes_one_batch_beyond_the_workers(workers: int, concurrent: bool, depth: int) -> None:
    assert Prefetcher(Slow(concurrent=concurrent), workers=workers).depth == depth
