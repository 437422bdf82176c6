"""Token directories: shards, document ends and the tokenizer's identity as one sequence. Imports no torch."""

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
    """The shards at a path as one sequence of tokens; created by `open_tokens`."""

    path: Path
    shards: list[Shard]
    manifest: dict[str, Any] | None

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """End of each shard in the sequence."""
        return np.cumsum([len(shard.tokens) for shard in self.shards], dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self.ends[-1])

    @cached_property
    def document_counts(self) -> npt.NDArray[np.int64] | None:
        """Cumulative number of documents at each shard's end, or None if a shard has no document ends."""
        ends = [shard.document_ends for shard in self.shards if shard.document_ends is not None]
        if len(ends) < len(self.shards):
            return None
        return np.cumsum([len(of_shard) for of_shard in ends], dtype=np.int64)

    @property
    def documents(self) -> int | None:
        """Number of documents in all shards, or None if a shard has no document ends."""
        return None if self.document_counts is None else int(self.document_counts[-1])

    @property
    def has_targets(self) -> bool:
        """Whether the target tokens are known, as in conversations."""
        return all(shard.targets is not None for shard in self.shards)

    @cached_property
    def document_ends(self) -> npt.NDArray[np.int64]:
        """End of each document in the sequence; requires document ends."""
        starts = self.ends - [len(shard.tokens) for shard in self.shards]
        parts = [
            start + shard.document_ends
            for start, shard in zip(starts, self.shards, strict=True)
            if shard.document_ends is not None
        ]
        return np.concatenate(parts)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size declared by the sidecars, or None."""
        return next((shard.vocab_size for shard in self.shards if shard.vocab_size is not None), None)

    @property
    def tokenizer(self) -> str | None:
        """SHA-256 that identifies the tokenizer, or None without a manifest."""
        return tokenizer_identity(self.manifest)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the tokens, independent of their path: equal for equal manifests."""
        files = [[shard.path.name, len(shard.tokens)] for shard in self.shards]
        content = files if self.manifest is None else self.manifest
        return {"tokens": self.tokens, "tokenizer": self.tokenizer, "content": digest(content)}

    def read(self, start: int, stop: int, *, vocab_size: int | None) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of the sequence.

        Raises:
            ValueError: an ID is outside the vocabulary.

        """
        parts = []
        for shard, first, last in self._parts(start, stop):
            parts.append(self.shards[shard].read(first, last, vocab_size=vocab_size))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def read_targets(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of the tokens [start, stop) of the sequence are targets."""
        parts = []
        for shard, first, last in self._parts(start, stop):
            targets = self.shards[shard].targets
            assert targets is not None
            parts.append(targets[first:last] != 0)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def read_documents(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the document index of each of the tokens [start, stop) of the sequence."""
        assert self.document_counts is not None
        parts = []
        for shard, first, last in self._parts(start, stop):
            ends = self.shards[shard].document_ends
            assert ends is not None
            before = int(self.document_counts[shard]) - len(ends)
            parts.append(before + np.searchsorted(ends, np.arange(first, last), side="right"))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the shards that contain the tokens [start, stop), with the range in each."""
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

    Sizes are always checked against manifest and sidecars.

    Args:
        path: a file, a directory of shards, or the output directory of `python -m trainer.tokenize`, whose
            training split is opened.
        dtype: type of ``.bin`` files whose sidecar does not declare it.
        check_sums: verify the checksums of files that have changed since the last verification, if there is a
            manifest.

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
    """Return the directory of a split if `path` is an output of `python -m trainer.tokenize`, else `path`."""
    return path / split if (path / split / MANIFEST).is_file() else path


def validation_folder(path: str | Path, validation_path: str | Path | None) -> Path | None:
    """Return the path of the held-out tokens, by default beside the training split, or None."""
    if validation_path is not None:
        return split_folder(Path(validation_path), VALIDATION)
    found = split_folder(Path(path), VALIDATION)
    return None if found == Path(path) else found


def check_tokens(
    tokens: TokenFolder, *, length: int, vocab_size: int | None, documents: str, tokenizer: str | None = None
) -> None:
    """Reject tokens that a run cannot be trained on.

    Args:
        tokens: see `open_tokens`.
        length: length of a sample.
        vocab_size: vocabulary size of the model.
        documents: ``"reset"`` to separate documents.
        tokenizer: required tokenizer, see `check_tokenizer`.

    Raises:
        ValueError: there are too few tokens, the vocabulary exceeds the model's, document ends are missing,
            or the tokenizer differs.

    """
    if tokens.tokens <= length:
        raise ValueError(
            f"{tokens.path} has {tokens.tokens} tokens, too few for one sample of length {length} and its "
            f"labels ({length + 1}); add tokens, or reduce the length: data.seq_len for training, "
            "evaluation.lengths or --lengths for evaluation"
        )
    stated = tokens.vocab_size
    if vocab_size is not None and stated is not None and stated > vocab_size:
        raise ValueError(
            f"the sidecar of {tokens.path} declares a vocabulary of {stated}, but the model has "
            f"vocab_size {vocab_size}; set model.vocab_size={stated}"
        )
    if tokenizer is not None:
        check_tokenizer(tokens, tokenizer)
    if documents == "reset" and tokens.documents is None:
        raise ValueError(
            f"{tokens.path} has no document ends, so documents cannot be separated; set "
            "data.documents=ignore, or write the tokens by python -m trainer.tokenize"
        )


def check_tokenizer(tokens: TokenFolder, tokenizer: str) -> None:
    """Reject tokens written with a different tokenizer.

    Args:
        tokens: see `open_tokens`.
        tokenizer: a `tokenizer.json`, a directory that contains one, or ``bytes``.

    Raises:
        ValueError: the tokenizer differs or is unknown.

    """
    from trainer.data.tokenizing.tokenizers import load_tokenizer

    identity = load_tokenizer(tokenizer).identity["sha256"]
    if tokens.tokenizer is None:
        raise ValueError(
            f"{tokens.path} has no {MANIFEST}, so the tokenizer of its tokens is unknown; omit "
            "data.tokenizer, or write the tokens by python -m trainer.tokenize"
        )
    if tokens.tokenizer != identity:
        raise ValueError(
            f"the tokens in {tokens.path} were written with a tokenizer other than {tokenizer} (SHA-256 "
            f"{tokens.tokenizer[:16]}…, not {identity[:16]}…); tokenize again, or set data.tokenizer to the "
            "original"
        )


def check_same_tokenizer(one: TokenFolder, other: TokenFolder) -> None:
    """Reject tokens of two different tokenizers in one run.

    Raises:
        ValueError: both tokenizers are known and differ.

    """
    if one.tokenizer is not None and other.tokenizer is not None and one.tokenizer != other.tokenizer:
        raise ValueError(
            f"the tokens in {one.path} and {other.path} were written with different tokenizers (SHA-256 "
            f"{one.tokenizer[:16]}… and {other.tokenizer[:16]}…); tokenize one of them again"
        )
