"""Tokenizers from files or of bytes, for transformers folders and for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import BYTES
from implicit_blocks.checkpoints.tokenizer_names import tokenizer_path
from implicit_blocks.hf import require_transformers

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Usual names of the end-of-text token, for vocabularies that do not name theirs."""
_PADDINGS = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")
"""Usual names of the padding token; a vocabulary with none of them pads with the end-of-text token."""


def load_tokenizer(path: str | Path, *, end: int | None = None) -> Any:
    """Load a ``tokenizer.json``, a folder with one and its companion files, a name on the Hub, or ``bytes``.

    A bare ``tokenizer.json`` does not name the end-of-text token that lm-eval and ``generate`` need: it is
    the token with the ID ``end`` if given, else the first of the usual names in the vocabulary.

    The tokenizer pads on the left, as ``generate`` and pipelines require, and always has a padding token: its
    own, one of the usual names, or the end-of-text token.

    Raises:
        ValueError: the path has no readable tokenizer, or no end-of-text token is known.
        ImportError: transformers is not installed; the message gives the installation command.

    """
    require_transformers("a tokenizer for text")
    loaded = _of_bytes() if str(path) == BYTES else _of_files(tokenizer_path(path), end)
    loaded.padding_side = loaded.init_kwargs["padding_side"] = "left"  # saving writes the latter
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
            f"no tokenizer at {path}; give a tokenizer.json, a folder that contains one, or 'bytes'"
        )
    try:
        if complete:
            loaded = AutoTokenizer.from_pretrained(path, local_files_only=True)
        else:
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the Rust side raises bare Exceptions
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from None
    if loaded.eos_token_id is None:
        vocabulary = loaded.get_vocab()
        named = None if end is None else loaded.convert_ids_to_tokens(end)
        token = named or next((token for token in _ENDS if token in vocabulary), None)
        if token is None:
            raise ValueError(
                f"the tokenizer of {path} does not name its end-of-text token and has none of "
                f"{', '.join(_ENDS)}; set eos_token in a tokenizer_config.json beside it"
            )
        loaded.eos_token = token
        if loaded.bos_token_id is None:
            loaded.bos_token = token
    return loaded


def _of_bytes() -> Any:
    """Create the tokenizer of UTF-8 bytes: IDs 0 to 255, and 256 for the end of a text.

    It is byte-level BPE (as in GPT-2) without merges, which represents every byte by its own letter.
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
    """Return the configuration fields of the tokens that begin, end and pad a text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: token for name in names if (token := getattr(tokenizer, name)) is not None}


def add_token_fields(model: Any, tokenizer: Any) -> None:
    """Set the tokens that begin, end and pad a text where a model of transformers does not name them."""
    for name, token in token_fields(tokenizer).items():
        for config in (model.config, model.generation_config):
            if getattr(config, name, None) is None:
                setattr(config, name, token)


def check_tokenizer_fits(tokenizer: Any, rows: int, *, name: object) -> None:
    """Check that a tokenizer fits a model's vocabulary of ``rows`` entries.

    Raises:
        ValueError: the tokenizer has IDs that the model lacks.

    """
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    if entries > rows:
        raise ValueError(
            f"the tokenizer of {name} has {entries} entries, but the model has {rows}; "
            "use the model's own tokenizer"
        )
