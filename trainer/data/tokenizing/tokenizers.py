"""Tokenizers: a `tokenizer.json` loaded by the package `tokenizers`, or raw bytes without dependencies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from implicit_blocks._utils.own_parts import install_extra

END_OF_DOCUMENT = "<|endoftext|>"
"""End-of-document token of tokenizers trained here, with ID 0."""
_USUAL_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")

Ids = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; all IDs are below it."""

    @property
    def end_of_document(self) -> int:
        """ID appended to each document."""

    @property
    def identity(self) -> dict[str, Any]:
        """Identity: equal for tokenizers that produce equal IDs, and different for others."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the IDs of each text, without added tokens."""


@dataclass(frozen=True)
class BytesTokenizer:
    """UTF-8 bytes as IDs 0 to 255; 256 ends a document."""

    vocab_size: int = 257
    end_of_document: int = 256

    @property
    def identity(self) -> dict[str, Any]:
        """See `Tokenizer.identity`."""
        return {"kind": "bytes", "sha256": hashlib.sha256(b"bytes").hexdigest(), "end_of_document": 256}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer.encode`."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizer.json` in memory; created by `load_tokenizer`.

    Special tokens that occur in a text are encoded as plain text; only the end of a document gets its special
    token. The identity is a hash of the file's content, independent of its formatting.
    """

    content: str = field(repr=False)
    end_of_document: int
    vocab_size: int
    _inner: Any = field(repr=False, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Tokenizer.identity`."""
        canonical = json.dumps(json.loads(self.content), sort_keys=True)
        sha256 = hashlib.sha256(canonical.encode()).hexdigest()
        return {"kind": "tokenizers", "sha256": sha256, "end_of_document": self.end_of_document}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer.encode`."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def load_tokenizer(source: str | Path, *, end_of_document: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: ``bytes``, a `tokenizer.json`, or a directory that contains one.
        end_of_document: token appended to documents; None: the `eos_token` of the directory's
            `tokenizer_config.json`, else the first known end token in the vocabulary (``<|endoftext|>``,
            ``</s>``, …).

    Raises:
        ValueError: the file does not exist, is not a tokenizer or has no end token, or the package is
            missing.

    """
    if str(source) == "bytes":
        if end_of_document is not None:
            raise ValueError(
                f"the bytes tokenizer has no token {end_of_document!r}; it ends documents with 256"
            )
        return BytesTokenizer()
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"there is no tokenizer {file}; give a tokenizer.json, a directory that contains one, or 'bytes'"
        )
    config = file.with_name("tokenizer_config.json")
    if end_of_document is None and config.is_file():
        end_of_document = _end_of(config)
    try:
        return from_content(file.read_text(encoding="utf-8"), end_of_document=end_of_document)
    except ValueError as error:
        raise ValueError(f"tokenizer {file}: {error}") from error


def _end_of(config: Path) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json`."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} cannot be read as JSON ({error}); set --end-of-document") from error
    token = fields.get("eos_token") if isinstance(fields, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise ValueError(f"eos_token in {config} must be text, got {token!r}; set --end-of-document")
    return token


def from_content(content: str, *, end_of_document: str | int | None = None) -> FileTokenizer:
    """Create a tokenizer from the content of a `tokenizer.json`.

    Raises:
        ValueError: as `load_tokenizer`, without the file name.

    """
    inner = _package().Tokenizer
    try:
        made = inner.from_str(content)
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(f"it cannot be read as a tokenizer.json ({error}); copy it again") from error
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    size = max(made.get_vocab(with_added_tokens=True).values()) + 1
    end = end_of_document
    if end is None:
        end = next((token for token in _USUAL_ENDS if made.token_to_id(token) is not None), None)
    number = made.token_to_id(end) if isinstance(end, str) else end
    if number is None or not 0 <= number < size:
        missing = f"it has no token {end!r}" if end is not None else "it has no known end token"
        raise ValueError(f"{missing}; set the end-of-document token by --end-of-document")
    return FileTokenizer(content=content, end_of_document=number, vocab_size=size, _inner=made)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer and return the content of its `tokenizer.json`.

    Byte-level BPE as in GPT-2 (Radford et al., 2019) encodes any text and has no unknown token. ID 0 is
    ``<|endoftext|>``. The result depends only on the texts, not on the number of threads.

    Args:
        texts: training texts.
        vocab_size: maximum number of IDs, at least 257; short texts give fewer.

    Raises:
        ValueError: the vocabulary is too small, or the package is missing.

    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (256 bytes and the end token), got {vocab_size}")
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        package.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return str(tokenizer.to_str(pretty=True))


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ValueError(
            f"a tokenizer.json needs the package tokenizers; install it by {install_extra('data')}, "
            "or use the tokenizer 'bytes'"
        ) from error
    return tokenizers
