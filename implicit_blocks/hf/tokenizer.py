"""Tokenizers from files, or of bytes, for folders of transformers and for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import BYTES
from implicit_blocks.hf import require_transformers

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""What usually ends a text, where a file of the vocabulary alone doesn't say."""
_PADDINGS = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")
"""What usually pads a text; a vocabulary without any of them pads with the token that ends a text."""


def load_tokenizer(path: str | Path, *, end: int | None = None) -> Any:
    """Load a ``tokenizer.json``, a folder with one and what transformers keeps beside it, or ``bytes``.

    A bare ``tokenizer.json`` doesn't say which token ends a text, which lm-eval and ``generate`` must know:
    it is taken to be the one with the id ``end``, else the one of the usual names that the vocabulary has.

    The tokenizer pads on the left, where ``generate`` and pipelines need it, and always has a padding token:
    its own, one of the usual names, or the token that ends a text.

    Raises:
        ValueError: there is none, it can't be read, or no token ends a text.
        ImportError: transformers is not installed; the message says how to get it.

    """
    require_transformers("a tokenizer for text")
    loaded = _of_bytes() if str(path) == BYTES else _of_files(Path(path), end)
    loaded.padding_side = loaded.init_kwargs["padding_side"] = "left"  # the latter is saved
    if loaded.pad_token_id is None:
        vocabulary = loaded.get_vocab()
        loaded.pad_token = next((token for token in _PADDINGS if token in vocabulary), loaded.eos_token)
    return loaded


def _of_files(path: Path, end: int | None) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    complete = path.is_dir() and (path / "tokenizer_config.json").is_file()
    if not complete and not file.is_file():
        raise ValueError(
            f"there is no tokenizer at {path}; give a tokenizer.json, a folder with one in it, or 'bytes'"
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


def _of_bytes() -> Any:
    """Make the tokenizer of UTF-8 bytes: ids 0 to 255, and 256 ends a text.

    It is byte-level BPE (as in GPT-2) without a merge, which writes every byte as a letter of its own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
    vocabulary = {letters[byte]: byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    end = _ENDS[0]
    loaded = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=end, eos_token=end, pad_token=end)
    assert loaded.eos_token_id == 256
    return loaded


def token_fields(tokenizer: Any) -> dict[str, int]:
    """Return what a configuration says of the tokens that begin, end and pad a text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: token for name in names if (token := getattr(tokenizer, name)) is not None}


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
