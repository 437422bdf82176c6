"""Conversations for fine-tuning: rows of whole conversations, with labels on the answers only.

The tokens are written by `python -m trainer.tokenize --chat`; `trainer.data.chat_rows` packs them. The
conversations of a row, and its padding, are separate documents, so no token sees another conversation: states
are reset and attention is masked.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.data.chat_rows import ChatRows, Scoring
from trainer.data.source import IGNORED, Batch, check_range
from trainer.data.token_folder import check_tokens, open_tokens, validation_folder
from trainer.data.tokens import FileData, positions_in_epochs

if TYPE_CHECKING:
    from trainer.specs.data import ChatSpec


class ChatData(FileData):
    """Rows of conversations, in an order that depends on the seed and the epoch.

    Args:
        path: see `trainer.data.token_folder.open_tokens`.
        length: L, number of input tokens per row.
        seed: seed of the order, 0 to 2^64 - 1.
        vocab_size: upper bound of the IDs, checked when they are read. None uses the sidecars'.
        validation_path: conversations to evaluate on; None: the validation split beside a training split, if
            any.
        packing: see `ChatRows`.
        scoring: see `ChatRows`; evaluation sets always score the answers.
        tokenizer: required tokenizer; see `trainer.data.token_folder.check_tokenizer`.
        check_sums: see `open_tokens`.

    Raises:
        ValueError: as `open_tokens`, `check_tokens` and `ChatRows`.

    """

    def __init__(
        self,
        path: str | Path,
        *,
        length: int,
        seed: int = 0,
        vocab_size: int | None = None,
        validation_path: str | Path | None = None,
        packing: bool = True,
        scoring: Scoring = "answers",
        tokenizer: str | None = None,
        check_sums: bool = False,
    ) -> None:
        self.files = open_tokens(path, check_sums=check_sums)
        check_tokens(self.files, length=1, vocab_size=vocab_size, documents="reset", tokenizer=tokenizer)
        self.rows = ChatRows(self.files, length=length, packing=packing, scoring=scoring)
        self._seed, self._packing, self._check_sums = seed, packing, check_sums
        self._validation_path = validation_folder(path, validation_path)
        self._limit = vocab_size if vocab_size is not None else self.files.vocab_size

    @property
    def length(self) -> int:
        """Number of input tokens per row."""
        return self.rows.length

    @property
    def samples(self) -> int:
        """Rows per epoch."""
        return len(self.rows)

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`; position n is in epoch ``n // samples``.

        Raises:
            ValueError: an ID is outside the vocabulary; names the file and offset.

        """
        check_range(position, count)
        indices = positions_in_epochs(position, count, samples=self.samples, seed=self._seed)
        rows = [self.rows.row(index, vocab_size=self._limit) for index in indices]
        inputs, following, scored, documents = map(np.stack, zip(*rows, strict=True))
        return Batch(
            inputs=torch.from_numpy(inputs),
            labels=torch.from_numpy(np.where(scored, following, IGNORED)),
            documents=torch.from_numpy(documents),
        )

    def _held_out(self, path: Path, *, length: int, seed: int) -> ChatData:
        return ChatData(
            path,
            length=length,
            seed=seed,
            vocab_size=self._limit,
            packing=self._packing,
            check_sums=self._check_sums,
        )


def build(spec: ChatSpec, *, seed: int = 0, vocab_size: int | None = None) -> ChatData:
    """Open the conversations of a `data` section.

    Args:
        spec: the section.
        seed: seed of the order of the rows.
        vocab_size: vocabulary size of the model; IDs must be below it.

    Raises:
        ValueError: the path is missing; else as `ChatData`.

    """
    if spec.path is None:
        raise ValueError("data.path is not set; give a directory of conversations, data.path=PATH")
    return ChatData(
        spec.path,
        length=spec.seq_len,
        seed=seed,
        vocab_size=vocab_size,
        validation_path=spec.validation_path,
        packing=spec.packing,
        scoring=spec.scoring,
        tokenizer=spec.tokenizer,
        check_sums=spec.check_sums,
    )
