"""Text as tokens: samples cut from memory-mapped files, in a random order that needs no memory.

The shards are read as one row of tokens. Sample i is the L + 1 tokens from i·L on: its inputs are the first
L, its labels the last L, so that every token but the very first is a label once an epoch, and neighbours
share one token. An incomplete rest is left out. Every epoch has its own order, which depends on the seed
and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.permutation import permute
from trainer.data.source import Batch, DataSource, EvaluationFields, EvaluationSet, check_range
from trainer.data.token_files import TokenDtype, open_shards, write_tokens

__all__ = ["TokenData", "build", "write_tokens"]


class TokenData(DataSource):
    """Samples of a token file, or of a folder of shards.

    Args:
        path: see `trainer.data.token_files.open_shards`.
        length: L, tokens in a sample's inputs.
        dtype: ``"uint16"`` or ``"uint32"``, for ``.bin`` files without a sidecar.
        seed: of the order; 0 to 2^64 - 1.
        vocab_size: ids must be below it; checked as they are read. None takes the sidecars'.
        validation_path: tokens to evaluate on; None evaluates nothing.

    Raises:
        ValueError: as `open_shards`; fewer than L + 1 tokens; a vocabulary smaller than the sidecars'.

    """

    def __init__(
        self,
        path: str | Path,
        *,
        length: int,
        dtype: TokenDtype | None = None,
        seed: int = 0,
        vocab_size: int | None = None,
        validation_path: str | Path | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(f"length {length} is too short; a sample has at least 1 token")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
        self.path = Path(path)
        self._shards = open_shards(path, dtype=dtype)
        self._length, self._dtype, self._seed = length, dtype, seed
        self._validation_path = validation_path
        self._ends = np.cumsum([len(shard.tokens) for shard in self._shards])
        self._samples = (self.tokens - 1) // length
        if self._samples < 1:
            raise ValueError(
                f"{path} holds {self.tokens} tokens, too few for one sample of length {length} and its "
                f"labels ({length + 1}); add tokens or shorten the length"
            )
        said = next((s.vocab_size for s in self._shards if s.vocab_size is not None), None)
        if vocab_size is not None and said is not None and said > vocab_size:
            raise ValueError(
                f"the tokens in {path} have a vocabulary of {said} by their sidecar, but the model has "
                f"vocab_size {vocab_size}; set model.vocab_size={said}"
            )
        self._limit = vocab_size
        self._vocab_size = said if said is not None else vocab_size

    @property
    def vocab_size(self) -> int | None:
        """The sidecars' vocabulary, else the one given."""
        return self._vocab_size

    @property
    def length(self) -> int:
        """Tokens in a sample's inputs."""
        return self._length

    @property
    def tokens(self) -> int:
        """Tokens in all shards together."""
        return int(self._ends[-1])

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return self._samples

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Read the L + 1 tokens of a sample, counted in the files' order, int64.

        Raises:
            ValueError: no such sample, or an id outside the vocabulary.

        """
        if not 0 <= index < self._samples:
            raise ValueError(f"sample {index} is not one of {self._samples}; they count from 0")
        return self._read(index * self._length, (index + 1) * self._length + 1)

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`; position n is in epoch ``n // samples``.

        Raises:
            ValueError: an id outside the vocabulary, with its file and offset.

        """
        check_range(position, count)
        indices = np.empty(count, dtype=np.int64)
        for epoch in range(position // self._samples, (position + count - 1) // self._samples + 1):
            first = max(position, epoch * self._samples)
            stop = min(position + count, (epoch + 1) * self._samples)
            within = np.arange(first, stop, dtype=np.int64) - epoch * self._samples
            ordered = permute(within, self._samples, seed=self._seed, epoch=epoch)
            indices[first - position : stop - position] = ordered
        tokens = torch.from_numpy(np.stack([self.sample(int(index)) for index in indices]))
        return Batch(inputs=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())

    def evaluation_sets(self, evaluation: EvaluationFields) -> Mapping[str, EvaluationSet]:
        """One set a length, named such as ``L2048``: random samples of the validation tokens, or all of them.

        Without validation tokens there is none.
        """
        if self._validation_path is None:
            return {}
        sets = {}
        for length in evaluation.lengths or (self._length,):
            source = TokenData(
                self._validation_path,
                length=length,
                dtype=self._dtype,
                seed=evaluation.seed,
                vocab_size=self._limit if self._limit is not None else self._vocab_size,
            )
            sets[f"L{length}"] = EvaluationSet(
                name=f"L{length}",
                source=source,
                sequences=min(evaluation.sequences, source.samples),
                settings={"length": length},
            )
        return sets

    def _read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of all shards, which a sample may span."""
        parts = []
        limit = self._limit if self._limit is not None else self._vocab_size
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            shard, end = self._shards[number], int(self._ends[number])
            offset = end - len(shard.tokens)
            parts.append(shard.read(start - offset, min(stop, end) - offset, vocab_size=limit))
            start, number = end, number + 1
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


class TokenFields(Protocol):
    """The fields of a run's `data` section of kind ``tokens``."""

    @property
    def path(self) -> str | None:
        """File or folder to train on."""

    @property
    def validation_path(self) -> str | None:
        """File or folder to evaluate on."""

    @property
    def length(self) -> int:
        """Tokens in a training sample."""

    @property
    def dtype(self) -> TokenDtype | None:
        """Type of raw files without a sidecar."""


def build(spec: TokenFields, *, seed: int = 0, vocab_size: int | None = None) -> TokenData:
    """Open the training tokens that a `data` section names.

    Args:
        spec: the section.
        seed: of the order of samples.
        vocab_size: the model's; ids must be below it.

    Raises:
        ValueError: no path; else as `TokenData`.

    """
    if spec.path is None:
        raise ValueError("data.path is not set; give a token file or a folder of them, data.path=PATH")
    return TokenData(
        spec.path,
        length=spec.length,
        dtype=spec.dtype,
        seed=seed,
        vocab_size=vocab_size,
        validation_path=spec.validation_path,
    )
