"""Tokenizers from files, for folders of transformers and for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""What usually ends a text, where a file of the vocabulary alone doesn't say."""


def load_tokenizer(path: str | Path, *, end: int | None = None) -> Any:
    """Load a ``tokenizer.json``, or a folder with one and what transformers keeps beside it.

    A bare ``tokenizer.json`` doesn't say which token ends a text, which lm-eval and ``generate`` must know:
    it is taken to be the one with the id ``end``, else the one of the usual names that the vocabulary has.

    Raises:
        ValueError: there is none, it can't be read, or no token ends a text.
        ImportError: transformers is not installed.

    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    complete = path.is_dir() and (path / "tokenizer_config.json").is_file()
    if not complete and not file.is_file():
        raise ValueError(
            f"there is no tokenizer at {path}; give a tokenizer.json, or a folder with one in it"
        )
    try:
        if complete:
            loaded = AutoTokenizer.from_pretrained(path, local_files_only=True)
        else:
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the Rust side raises bare Exceptions
        raise ValueError(f"{file} is no tokenizer that can be read: {error}") from None
    if loaded.eos_token_id is None:
        vocabulary = loaded.get_vocab()
        named = None if end is None else loaded.convert_ids_to_tokens(end)
        token = named or next((token for token in _ENDS if token in vocabulary), None)
        if token is None:
            raise ValueError(
                f"the tokenizer of {path} doesn't say which token ends a text, and has none of "
                f"{', '.join(_ENDS)}; name it as eos_token in a tokenizer_config.json beside it"
            )
        loaded.eos_token = token
        if loaded.bos_token_id is None:
            loaded.bos_token = token
    return loaded


def token_fields(tokenizer: Any) -> dict[str, int]:
    """Return what a configuration says of the tokens that begin and end a text."""
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {name: token for name, token in ends.items() if token is not None}


def check_tokenizer_fits(tokenizer: Any, rows: int, *, name: object) -> None:
    """Compare a tokenizer with a model's vocabulary of ``rows``.

    Raises:
        ValueError: the tokenizer has ids that the model lacks.

    """
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    if entries > rows:
        raise ValueError(
            f"the tokenizer of {name} has {entries} entries and the model {rows}; "
            "take the model's own tokenizer"
        )
