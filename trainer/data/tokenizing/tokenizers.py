"""Tokenizers: a `tokenizer.json` by the package `tokenizers`, or bytes, which need nothing."""

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
"""The token that a tokenizer trained here ends documents with, its id 0."""
_USUAL_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")

Ids = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Text to ids."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""

    @property
    def end_of_document(self) -> int:
        """The id that stands after each document."""

    @property
    def identity(self) -> dict[str, Any]:
        """What it is: equal for tokenizers that give equal ids, and different for others."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Give the ids of each text, nothing added."""


@dataclass(frozen=True)
class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document."""

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
    """A `tokenizer.json`, in memory; made by `load_tokenizer`.

    Special tokens that are written out in a text are encoded as the text that they are: only the end of a
    document gets its token. The identity is that of the file's content, its layout left aside.
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
        source: ``bytes``, a `tokenizer.json`, or a folder that holds one.
        end_of_document: the token to end documents with; None: the `eos_token` of the folder's
            `tokenizer_config.json`, or else the first there is of the usual ones (``<|endoftext|>``,
            ``</s>``, …).

    Raises:
        ValueError: no such file, not a tokenizer, no token to end documents with, the package is missing.

    """
    if str(source) == "bytes":
        if end_of_document is not None:
            raise ValueError(f"the bytes tokenizer has no {end_of_document!r}; it ends documents with 256")
        return BytesTokenizer()
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"there is no tokenizer {file}; give a tokenizer.json, a folder that holds one, or 'bytes'"
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
        raise ValueError(f"{config} can't be read as JSON ({error}); name --end-of-document") from error
    token = fields.get("eos_token") if isinstance(fields, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise ValueError(f"{config} has eos_token {token!r}, not text; name --end-of-document")
    return token


def from_content(content: str, *, end_of_document: str | int | None = None) -> FileTokenizer:
    """Make a tokenizer from the content of a `tokenizer.json`.

    Raises:
        ValueError: as `load_tokenizer`, without the file's name.

    """
    inner = _package().Tokenizer
    try:
        made = inner.from_str(content)
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(f"it can't be read as a tokenizer.json ({error}); copy it again") from error
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    size = max(made.get_vocab(with_added_tokens=True).values()) + 1
    end = end_of_document
    if end is None:
        end = next((token for token in _USUAL_ENDS if made.token_to_id(token) is not None), None)
    number = made.token_to_id(end) if isinstance(end, str) else end
    if number is None or not 0 <= number < size:
        missing = f"it has no token {end!r}" if end is not None else "it has none of the usual end tokens"
        raise ValueError(f"{missing}; name the token that ends a document by --end-of-document")
    return FileTokenizer(content=content, end_of_document=number, vocab_size=size, _inner=made)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer and give the content of its `tokenizer.json`.

    Byte-level BPE as in GPT-2 (Radford et al., 2019): any text can be encoded, no unknown token. Id 0 is
    ``<|endoftext|>``. The same texts give the same tokenizer, however many threads there are.

    Args:
        texts: to learn the merges from.
        vocab_size: ids in all, 257 at least; fewer come out where the texts are too short for more.

    Raises:
        ValueError: too small a vocabulary, the package is missing.

    """
    if vocab_size < 257:
        raise ValueError(f"a vocabulary of {vocab_size} is too small; 256 bytes and the end token need 257")
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
