"""Tokenizers by name: a local path, or a repository of the Hugging Face Hub. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from implicit_blocks.checkpoints.find import BYTES

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "config.json",
)  # fmt: skip
"""The files of a repository that a tokenizer consists of, without any weights."""


def is_tokenizer_name(source: str | Path) -> bool:
    """Return whether a source that does not exist locally can be a repository's name, such as ``gpt2``."""
    name = str(source)
    return name != BYTES and not name.endswith(".json") and _NAME.fullmatch(name) is not None


def tokenizer_path(source: str | Path) -> Path:
    """Return a tokenizer's local path: the source if it exists, else the folder of its files from the Hub.

    A name is resolved as transformers resolves it: from the cache, or by a download. Other sources that do
    not exist are returned unchanged.

    Raises:
        ValueError: the name has neither a local path nor a repository that can be read.

    """
    if Path(source).exists() or not is_tokenizer_name(source):
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), allow_patterns=list(_FILES)))
    except ImportError as error:
        raise ValueError(_missing(source, "the package huggingface_hub is not installed")) from error
    except Exception as error:  # whatever the network, the Hub and the cache raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(_missing(source, f"the Hub returned no repository {source}: {reason}")) from error


def _missing(source: str | Path, reason: str) -> str:
    return (
        f"there is no tokenizer {source}: no such file or directory exists, and {reason}; give a "
        "tokenizer.json, a directory that contains one, a repository of the Hub, or 'bytes'"
    )
