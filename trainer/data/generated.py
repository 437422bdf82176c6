"""Sequences that a task generates on the fly, at numbered positions.

Position i of a stream is in block ``i // 128``. The random words of a block are Philox's for the key (seed,
domain) and the counter (block), so a sequence does not depend on batches, ranks or restarts. Training and
evaluation are different domains and share no random words, even with equal seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.random_tokens import random_words
from trainer.data.source import Batch, EndlessSource, EvaluationSet, check_range, sets_by_length

if TYPE_CHECKING:
    from trainer.specs.run import EvaluationSpec

BLOCK = 128
"""Sequences generated together."""

TRAINING, EVALUATION = 0, 1
"""Domains of random words."""

Integers = npt.NDArray[np.int64]


class Draws:
    """Uniform random integers and words from one block's stream.

    Args:
        key: seed and domain.
        block: index of the block.

    """

    def __init__(self, key: tuple[int, int], block: int) -> None:
        self._key, self._block, self._stream = key, block, 0

    def words(self, *shape: int) -> npt.NDArray[np.uint64]:
        """Return 64-bit words of the given shape."""
        drawn = random_words(self._key, stream=self._stream, index=self._block, count=int(np.prod(shape)))
        self._stream += 1
        return drawn.reshape(shape)

    def integers(self, below: int, *shape: int) -> Integers:
        """Return integers from 0 to ``below`` − 1, each with probability 1/below to within 2^-32."""
        high = self.words(*shape) >> np.uint64(32)
        return ((high * np.uint64(below)) >> np.uint64(32)).astype(np.int64)


class Task(ABC):
    """A task whose inputs and labels are drawn together."""

    vocab_size: int
    """Number of token IDs, of inputs and labels."""
    least_length: int = 1
    """Length from which on a sequence can have a scored token."""

    @abstractmethod
    def draw(self, draws: Draws, length: int, *, evaluation: bool) -> tuple[Integers, Integers]:
        """Return inputs and labels (BLOCK, length); `trainer.data.source.IGNORED` labels are not scored.

        Args:
            draws: the random numbers of the block.
            length: tokens per sequence.
            evaluation: whether the sequences are for evaluation, for tasks with a pool of their own for it.

        """


class GeneratedData(EndlessSource):
    """An endless stream of a task's sequences.

    Args:
        task: generates the sequences.
        length: tokens per sequence.
        seed: from 0 to 2^64 − 1.
        fixed_length: whether all sequences of the task have this length, as boards have.

    """

    def __init__(
        self, task: Task, *, length: int, seed: int, fixed_length: bool = False, _domain: int = TRAINING
    ) -> None:
        super().__init__(length=length)
        self._task, self._fixed_length = task, fixed_length
        self._key = seed, _domain

    @property
    def vocab_size(self) -> int:
        """Number of token IDs."""
        return self._task.vocab_size

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`."""
        check_range(position, count)
        inputs, labels = [], []
        for block in range(position // BLOCK, (position + count - 1) // BLOCK + 1):
            drawn = self._task.draw(
                Draws(self._key, block), self._length, evaluation=self._key[1] == EVALUATION
            )
            first, stop = max(0, position - block * BLOCK), min(BLOCK, position + count - block * BLOCK)
            inputs.append(drawn[0][first:stop])
            labels.append(drawn[1][first:stop])
        return Batch(
            inputs=torch.from_numpy(np.concatenate(inputs)), labels=torch.from_numpy(np.concatenate(labels))
        )

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return one set per length, named like ``L64``.

        Raises:
            ValueError: another length for a task of fixed length, or one that is too short for the task.

        """
        lengths = evaluation.lengths or (self._length,)
        if min(lengths) < self._task.least_length:
            raise ValueError(
                f"evaluation.lengths is {list(lengths)}, but sequences of {min(lengths)} tokens have none "
                f"that is scored; choose lengths of at least {self._task.least_length}"
            )
        if self._fixed_length and set(lengths) != {self._length}:
            raise ValueError(
                f"evaluation.lengths is {list(lengths)}, but all boards have {self._length} cells; remove it"
            )

        def held_out(length: int) -> GeneratedData:
            return GeneratedData(
                self._task,
                length=length,
                seed=evaluation.seed,
                fixed_length=self._fixed_length,
                _domain=EVALUATION,
            )

        return sets_by_length(lengths, evaluation.sequences, held_out)
