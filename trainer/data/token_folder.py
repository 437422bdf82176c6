"""Tokens at a path as one row: shards, document ends, which tokenizer made them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.manifest import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    read_manifest,
    require_finished,
    tokenizer_identity,
    verify,
)
from trainer.data.token_files import Shard, TokenDtype, open_shards
from trainer.storage.files import digest


@dataclass(frozen=True)
class TokenFolder:
    """The shards of a path, read as one row of tokens; made by `open_tokens`."""

    path: Path
    shards: list[Shard]
    manifest: dict[str, Any] | None

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each shard ends in the row."""
        return np.cumsum([len(shard.tokens) for shard in self.shards], dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Tokens in all shards together."""
        return int(self.ends[-1])

    @cached_property
    def document_counts(self) -> npt.NDArray[np.int64] | None:
        """How many documents end before each shard's end; None where a shard doesn't say."""
        ends = [shard.document_ends for shard in self.shards if shard.document_ends is not None]
        if len(ends) < len(self.shards):
            return None
        return np.cumsum([len(of_shard) for of_shard in ends], dtype=np.int64)

    @property
    def documents(self) -> int | None:
        """Documents in all shards together; None where a shard doesn't say."""
        return None if self.document_counts is None else int(self.document_counts[-1])

    @property
    def vocab_size(self) -> int | None:
        """The sidecars' vocabulary, if one of them says."""
        return next((shard.vocab_size for shard in self.shards if shard.vocab_size is not None), None)

    @property
    def tokenizer(self) -> str | None:
        """The SHA-256 that identifies the tokenizer, where the manifest says it."""
        return tokenizer_identity(self.manifest)

    def identity(self) -> dict[str, Any]:
        """Say what the tokens are, wherever they lie: equal for equal manifests."""
        files = [[shard.path.name, len(shard.tokens)] for shard in self.shards]
        content = files if self.manifest is None else self.manifest
        return {"tokens": self.tokens, "tokenizer": self.tokenizer, "content": digest(content)}

    def read(self, start: int, stop: int, *, vocab_size: int | None) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of the row.

        Raises:
            ValueError: an id outside the vocabulary.

        """
        parts = []
        for shard, first, last in self._parts(start, stop):
            parts.append(self.shards[shard].read(first, last, vocab_size=vocab_size))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def read_documents(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Which document each of the tokens [start, stop) belongs to, counted from the row's beginning."""
        assert self.document_counts is not None
        parts = []
        for shard, first, last in self._parts(start, stop):
            ends = self.shards[shard].document_ends
            assert ends is not None
            before = int(self.document_counts[shard]) - len(ends)
            parts.append(before + np.searchsorted(ends, np.arange(first, last), side="right"))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Find the shards that hold the tokens [start, stop), and which of theirs these are."""
        parts = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end = int(self.ends[number])
            offset = end - len(self.shards[number].tokens)
            parts.append((number, start - offset, min(stop, end) - offset))
            start, number = end, number + 1
        return parts


def open_tokens(
    path: str | Path, *, dtype: TokenDtype | None = None, check_sums: bool = False
) -> TokenFolder:
    """Open the tokens at a path.

    Sizes are checked against manifest and sidecars in any case.

    Args:
        path: a file, a folder of shards, or the output folder of `python -m trainer.tokenize`: its training
            split.
        dtype: of ``.bin`` files without a sidecar that says.
        check_sums: compare the checksums with the manifest's, where there is one, for files that have changed
            since that was last done.

    Raises:
        ValueError: as `open_shards`, `require_finished`, `read_manifest` and `verify`.

    """
    require_finished(Path(path))
    path = split_folder(Path(path), TRAIN)
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and check_sums:
        verify(path)
    return TokenFolder(path, open_shards(path, dtype=dtype), manifest)


def split_folder(path: Path, split: str) -> Path:
    """Give the folder of a split, if `path` is the output of `python -m trainer.tokenize`, else `path`."""
    return path / split if (path / split / MANIFEST).is_file() else path


def validation_folder(path: str | Path, validation_path: str | Path | None) -> Path | None:
    """Where the held-out tokens are: as said, or else beside the training split at `path`; None: nowhere."""
    if validation_path is not None:
        return split_folder(Path(validation_path), VALIDATION)
    found = split_folder(Path(path), VALIDATION)
    return None if found == Path(path) else found


def check_tokens(
    tokens: TokenFolder, *, length: int, vocab_size: int | None, documents: str, tokenizer: str | None = None
) -> None:
    """Refuse tokens that a run can't be trained on.

    Args:
        tokens: see `open_tokens`.
        length: of a sample.
        vocab_size: the model's.
        documents: ``"reset"`` if they are to be kept apart.
        tokenizer: the one that must have made them, see `check_tokenizer`.

    Raises:
        ValueError: too few tokens, a vocabulary larger than the model's, documents whose ends nothing says,
            another tokenizer.

    """
    if tokens.tokens <= length:
        raise ValueError(
            f"{tokens.path} holds {tokens.tokens} tokens, too few for one sample of length {length} and its "
            f"labels ({length + 1}); add tokens, or shorten the length: data.seq_len of training, "
            "evaluation.lengths or --lengths of what is evaluated"
        )
    stated = tokens.vocab_size
    if vocab_size is not None and stated is not None and stated > vocab_size:
        raise ValueError(
            f"the tokens in {tokens.path} have a vocabulary of {stated} by their sidecar, but the model has "
            f"vocab_size {vocab_size}; set model.vocab_size={stated}"
        )
    if tokenizer is not None:
        check_tokenizer(tokens, tokenizer)
    if documents == "reset" and tokens.documents is None:
        raise ValueError(
            f"the tokens in {tokens.path} don't say where documents end, so they can't be kept apart; set "
            "data.documents=ignore, or write them by python -m trainer.tokenize"
        )


def check_tokenizer(tokens: TokenFolder, tokenizer: str) -> None:
    """Refuse tokens that another tokenizer made.

    Args:
        tokens: see `open_tokens`.
        tokenizer: a `tokenizer.json`, a folder that holds one, or ``bytes``.

    Raises:
        ValueError: another tokenizer, or one that can't be told.

    """
    from trainer.data.tokenizing.tokenizers import load_tokenizer

    identity = load_tokenizer(tokenizer).identity["sha256"]
    if tokens.tokenizer is None:
        raise ValueError(
            f"{tokens.path} has no {MANIFEST}, so nothing says which tokenizer made its tokens; leave "
            "data.tokenizer out, or write the tokens by python -m trainer.tokenize"
        )
    if tokens.tokenizer != identity:
        raise ValueError(
            f"the tokens in {tokens.path} were made by another tokenizer than {tokenizer} (SHA-256 "
            f"{tokens.tokenizer[:16]}…, not {identity[:16]}…); write them again, or name that one"
        )


def check_same_tokenizer(one: TokenFolder, other: TokenFolder) -> None:
    """Refuse tokens of two tokenizers in one run.

    Raises:
        ValueError: both say which tokenizer made them, and it isn't the same.

    """
    if one.tokenizer is not None and other.tokenizer is not None and one.tokenizer != other.tokenizer:
        raise ValueError(
            f"the tokens in {one.path} and {other.path} were made by different tokenizers (SHA-256 "
            f"{one.tokenizer[:16]}… and {other.tokenizer[:16]}…); write one of them again"
        )
