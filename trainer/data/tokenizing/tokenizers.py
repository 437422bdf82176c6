"""Tokenizers: a `tokenizer.json` loaded by the package `tokenizers`, or raw bytes without dependencies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.checkpoints.find import TOKENIZER
from implicit_blocks.checkpoints.tokenizer_names import tokenizer_path

END_OF_DOCUMENT = "<|endoftext|>"
"""End-of-document token of tokenizers trained here, with ID 0."""
_USUAL_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a `tokenizer.json` that name its special tokens and have its chat template."""

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
    companions: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The contents of the `COMPANIONS` beside the file, by name."""

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
        source: ``bytes``, a `tokenizer.json`, a directory with a tokenizer of transformers, or the name of
            one on the Hugging Face Hub, as `AutoTokenizer` resolves it.
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
    path = tokenizer_path(source)
    file = path / TOKENIZER if path.is_dir() else path
    config = file.with_name("tokenizer_config.json")
    if file.is_file():
        content, companions = file.read_text(encoding="utf-8"), _companions(file.parent)
    elif config.is_file():
        content, companions = _converted(path)
    else:
        raise ValueError(
            f"there is no tokenizer {file}; give a tokenizer.json, a directory that contains one, the name "
            "of one on the Hub, or 'bytes'"
        )
    if end_of_document is None and config.is_file():
        end_of_document = _end_of(config)
    try:
        loaded = from_content(content, end_of_document=end_of_document)
    except ValueError as error:
        raise ValueError(f"tokenizer {file}: {error}") from error
    return replace(loaded, companions=companions)


def _companions(folder: Path) -> dict[str, str]:
    """Read the files beside a `tokenizer.json`, except a configuration that needs code of its own."""
    files = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    found = {file.name: file.read_text(encoding="utf-8") for file in files}
    if '"auto_map"' in found.get("tokenizer_config.json", ""):
        del found["tokenizer_config.json"]
    return found


def _converted(folder: Path) -> tuple[str, dict[str, str]]:
    """Convert a tokenizer of transformers without a `tokenizer.json`: its content, and its companions."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no {TOKENIZER}, so reading its tokenizer needs the package transformers; install "
            f"it by {install_extra('hf')}"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        files = loaded.vocab_files_names.values()
        if not any((folder / name).is_file() for name in files):  # transformers makes an empty tokenizer
            raise ValueError(f"it has none of its files {', '.join(files)}")
        with TemporaryDirectory() as temporary:
            loaded.save_pretrained(temporary)
            return (Path(temporary) / TOKENIZER).read_text(encoding="utf-8"), _companions(Path(temporary))
    except Exception as error:  # transformers raises whatever its tokenizers raise
        raise ValueError(
            f"the tokenizer in {folder} has no {TOKENIZER} and cannot be converted to one "
            f"({type(error).__name__}: {error}); save it by transformers as a fast tokenizer"
        ) from error


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
        tokenizer = inner.from_str(content)
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(f"it cannot be read as a tokenizer.json ({error}); copy it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    end = end_of_document
    if end is None:
        end = next((token for token in _USUAL_ENDS if tokenizer.token_to_id(token) is not None), None)
    number = tokenizer.token_to_id(end) if isinstance(end, str) else end
    if number is None or not 0 <= number < size:
        missing = f"it has no token {end!r}" if end is not None else "it has no known end token"
        raise ValueError(f"{missing}; set the end-of-document token by --end-of-document")
    return FileTokenizer(content=content, end_of_document=number, vocab_size=size, _inner=tokenizer)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str] = ()) -> str:
    """Train a byte-level BPE tokenizer and return the content of its `tokenizer.json`.

    Byte-level BPE as in GPT-2 (Radford et al., 2019) encodes any text and has no unknown token. ID 0 is
    ``<|endoftext|>``. The result depends only on the texts, not on the number of threads.

    Args:
        texts: training texts.
        vocab_size: maximum number of IDs, at least 257 and one for each special token; short texts give
            fewer.
        special_tokens: further tokens that text does not contain, such as those of a chat template, with IDs
            from 1.

    Raises:
        ValueError: the vocabulary is too small, a special token is given twice, or the package is missing.

    """
    special = [END_OF_DOCUMENT, *special_tokens]
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size must be at least {256 + len(special)} (256 bytes and {', '.join(special)}), got "
            f"{vocab_size}"
        )
    if len(set(special)) < len(special) or "" in special:
        raise ValueError(f"special tokens must differ and not be empty, got {', '.join(map(repr, special))}")
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        package.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
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
