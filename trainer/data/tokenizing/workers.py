"""Worker processes that tokenize tasks; results are returned in input order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizing.chat import ChatTokenizer
from trainer.data.tokenizing.shards import Dtype, Targets
from trainer.data.tokenizing.tokenizers import FileTokenizer, Tokenizer


class Task(NamedTuple):
    """Pieces of text to encode together: sides, input indices, texts, whether they end documents, places."""

    sides: list[str]
    numbers: list[int]
    texts: list[str]
    ends: list[bool]
    places: list[str]


class Encoded(NamedTuple):
    """The concatenated IDs of all pieces, the length of each, and for conversations the target tokens."""

    ids: npt.NDArray[np.integer[Any]]
    lengths: list[int]
    targets: Targets | None


Encode = Callable[[Iterator[Task]], Iterator[tuple[Task, Encoded]]]


@contextlib.contextmanager
def encoders(tokenizer: Tokenizer, *, dtype: Dtype, workers: int) -> Iterator[Encode]:
    """Provide a function that encodes tasks in order: in this process, or in ``workers`` other processes.

    Raises:
        ValueError: a worker process died.

    """
    if workers == 1:

        def serially(tasks: Iterator[Task]) -> Iterator[tuple[Task, Encoded]]:
            for task in tasks:
                yield task, _encode(tokenizer, dtype, task)

        yield serially
        return
    # Spawn, because a forked process would inherit threads' locks in an unknown state.
    with ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(_recipe(tokenizer), dtype),
    ) as pool:

        def side_by_side(tasks: Iterator[Task]) -> Iterator[tuple[Task, Encoded]]:
            waiting: deque[tuple[Task, Future[Encoded]]] = deque()
            try:
                for task in tasks:
                    waiting.append((task, pool.submit(_work, task)))
                    if len(waiting) > 2 * workers:
                        first, future = waiting.popleft()
                        yield first, future.result()
                while waiting:
                    first, future = waiting.popleft()
                    yield first, future.result()
            except BrokenProcessPool as error:
                raise ValueError(
                    "a worker process died, possibly out of memory; run the same command with fewer "
                    "--workers to resume after the finished shards"
                ) from error
            finally:
                for _, future in waiting:
                    future.cancel()

        yield side_by_side


def _recipe(tokenizer: Tokenizer) -> Any:
    """Return a picklable description of the tokenizer; the package's objects cannot all be pickled."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.content, tokenizer.end_of_document
    return tokenizer


_worker: tuple[Tokenizer, Dtype]


def _start_worker(recipe: Any, dtype: Dtype) -> None:
    global _worker
    from trainer.data.tokenizing.tokenizers import from_content

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent also receives the interrupt and stops the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores between them
    if isinstance(recipe, tuple):
        content, end = recipe
        recipe = from_content(content, end_of_document=end)
    _worker = recipe, dtype
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)  # the parent was killed

    threading.Thread(target=follow, daemon=True).start()


def _work(task: Task) -> Encoded:
    return _encode(*_worker, task)


def _encode(tokenizer: Tokenizer, dtype: Dtype, task: Task) -> Encoded:
    if isinstance(tokenizer, ChatTokenizer):
        conversations = [tokenizer.conversation(*each) for each in zip(task.texts, task.places, strict=True)]
        ids = np.concatenate([each for each, _ in conversations]).astype(dtype)
        return Encoded(
            ids, [len(each) for each, _ in conversations], np.concatenate([each for _, each in conversations])
        )
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    parts = []
    for ids, ends in zip(tokenizer.encode(task.texts), task.ends, strict=True):
        parts.append(np.concatenate([ids.astype(dtype), end]) if ends else ids.astype(dtype))
    return Encoded(np.concatenate(parts), [len(part) for part in parts], None)
