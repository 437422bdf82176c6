"""Tokenized text: samples cut from memory-mapped files, in a memory-free random order.

The shards form one sequence of tokens. Sample i is the L + 1 tokens from i·L on: its inputs are the first L,
its labels the last L, so that every token but the very first is a label once per epoch, and neighboring
samples share one token. An incomplete remainder is dropped. The order of an epoch depends only on the seed
and the epoch.

Documents are therefore packed into rows without gaps, and long documents continue in another row. With
``documents="reset"`` a batch contains the document of each token, and a document's first token is not a
label, because no token of its document precedes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.permutation import permute
from trainer.data.source import IGNORED, Batch, DataSource, EvaluationSet, check_range, sets_by_length
from trainer.data.token_files import TokenDtype, write_tokens
from trainer.data.token_folder import (
    TokenFolder,
    check_same_tokenizer,
    check_tokens,
    open_tokens,
    validation_folder,
)

if TYPE_CHECKING:
    from trainer.specs.data import TokensSpec
    from trainer.specs.run import EvaluationSpec

__all__ = ["TokenData", "build", "write_tokens"]

Documents = Literal["ignore", "reset"]


class FileData(DataSource):
    """Data of token files, with an evaluation on held-out files."""

    concurrent = True
    files: TokenFolder
    _dtype: TokenDtype | None = None
    _limit: int | None
    _validation_path: Path | None

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size declared by the sidecars, else the one given."""
        stated = self.files.vocab_size
        return stated if stated is not None else self._limit

    def identity(self) -> Mapping[str, Any]:
        """See `DataSource.identity`: that of the manifest, or else of the files' names and sizes."""
        return self.files.identity()

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return one set of held-out samples per length, named like ``L2048``: random ones, or all of them.

        Without held-out files there are no sets.
        """
        path = self._validation_path
        if path is None:
            return {}
        check_same_tokenizer(self.files, open_tokens(path, dtype=self._dtype))

        def held_out(length: int) -> DataSource:
            return self._held_out(path, length=length, seed=evaluation.seed)

        return sets_by_length(evaluation.lengths or (self.length,), evaluation.sequences, held_out)

    @abstractmethod
    def _held_out(self, path: Path, *, length: int, seed: int) -> DataSource:
        """Open the held-out files with the options of these data."""


class TokenData(FileData):
    """Samples of a token file or a directory of shards.

    Args:
        path: see `trainer.data.token_folder.open_tokens`.
        length: L, number of input tokens per sample.
        dtype: ``"uint16"`` or ``"uint32"``, for ``.bin`` files without a sidecar.
        seed: seed of the order, 0 to 2^64 - 1.
        vocab_size: upper bound of the IDs, checked when they are read. None uses the sidecars'.
        validation_path: tokens to evaluate on; None: the validation split beside a training split, if any.
        documents: ``"reset"`` separates the documents in a row: states and attention are reset.
        tokenizer: required tokenizer; see `trainer.data.token_folder.check_tokenizer`.
        check_sums: see `open_tokens`.

    Raises:
        ValueError: as `open_tokens` and `check_tokens`.

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
        documents: Documents = "ignore",
        tokenizer: str | None = None,
        check_sums: bool = False,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
        self.files = open_tokens(path, dtype=dtype, check_sums=check_sums)
        self.path = self.files.path
        self._length, self._dtype, self._seed = length, dtype, seed
        self._validation_path = validation_folder(path, validation_path)
        self._documents, self._check_sums = documents, check_sums
        check_tokens(
            self.files, length=length, vocab_size=vocab_size, documents=documents, tokenizer=tokenizer
        )
        self._samples = (self.tokens - 1) // length
        self._limit = vocab_size if vocab_size is not None else self.files.vocab_size

    @property
    def length(self) -> int:
        """Number of input tokens per sample."""
        return self._length

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return self.files.tokens

    @property
    def samples(self) -> int:
        """Samples per epoch."""
        return self._samples

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return the L + 1 tokens of a sample, indexed in file order, int64.

        Raises:
            ValueError: the index is out of range, or an ID is outside the vocabulary.

        """
        return self.files.read(*self._range(index), vocab_size=self._limit)

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`; position n is in epoch ``n // samples``.

        Raises:
            ValueError: an ID is outside the vocabulary; names the file and offset.

        """
        check_range(position, count)
        indices = positions_in_epochs(position, count, samples=self._samples, seed=self._seed)
        tokens = np.stack([self.sample(index) for index in indices])
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if self._documents == "ignore":
            return Batch(inputs=torch.from_numpy(inputs), labels=torch.from_numpy(labels))
        numbers = np.stack([self.files.read_documents(*self._range(index)) for index in indices])
        labels[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        documents = numbers[:, :-1] - numbers[:, :1]
        return Batch(
            inputs=torch.from_numpy(inputs),
            labels=torch.from_numpy(labels),
            documents=torch.from_numpy(documents),
        )

    def _held_out(self, path: Path, *, length: int, seed: int) -> TokenData:
        return TokenData(
            path,
            length=length,
            dtype=self._dtype,
            seed=seed,
            vocab_size=self._limit,
            documents=self._documents,
            check_sums=self._check_sums,
        )

    def _range(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._samples:
            raise ValueError(f"sample index must be from 0 to {self._samples - 1}, got {index}")
        return index * self._length, (index + 1) * self._length + 1


def positions_in_epochs(position: int, count: int, *, samples: int, seed: int) -> list[int]:
    """Return the indices of the samples at positions [position, position + count).

    Args:
        position: of the first sample.
        count: number of samples.
        samples: number of samples per epoch.
        seed: of the order, which differs between epochs.

    """
    indices = np.empty(count, dtype=np.int64)
    for epoch in range(position // samples, (position + count - 1) // samples + 1):
        first = max(position, epoch * samples)
        stop = min(position + count, (epoch + 1) * samples)
        within = np.arange(first, stop, dtype=np.int64) - epoch * samples
        indices[first - position : stop - position] = permute(within, samples, seed=seed, epoch=epoch)
    return [int(index) for index in indices]


def build(spec: TokensSpec, *, seed: int = 0, vocab_size: int | None = None) -> TokenData:
    """Open the training tokens of a `data` section.

    Args:
        spec: the section.
        seed: seed of the sample order.
        vocab_size: vocabulary size of the model; IDs must be below it.

    Raises:
        ValueError: the path is missing; else as `TokenData`.

    """
    if spec.path is None:
        raise ValueError("data.path is not set; give a token file or a directory of them, data.path=PATH")
    return TokenData(
        spec.path,
        length=spec.seq_len,
        dtype=spec.dtype,
        seed=seed,
        vocab_size=vocab_size,
        validation_path=spec.validation_path,
        documents=spec.documents,
        tokenizer=spec.tokenizer,
        check_sums=spec.check_sums,
    )
