"""Text and tokens of a served model: bytes, a tokenizer's words, or the numbers of tokens."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from implicit_blocks.checkpoints.find import BYTES

CONTEXT = 8
"""Number of tokens of the prompt that the text of a continuation is decoded with."""
END_OF_BYTES = 256
"""The token that ends a text of bytes."""


class TextStream(Protocol):
    """The text of a continuation, by tokens."""

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; return the text that they complete, which may be empty."""

    def finish(self) -> str:
        """Return the rest of the text, such as an incomplete character."""


class Language(ABC):
    """Conversions between text and tokens.

    ``stop_token_ids`` are the tokens that end a text.
    """

    stop_token_ids: tuple[int, ...] = ()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ValueError: for text that has no tokens.

        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    @abstractmethod
    def token(self, token: int) -> str:
        """Return the text of a single token; of one that is no whole character, its bytes as text."""

    @abstractmethod
    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Return the text of a continuation of ``prompt``."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the answer.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.

        """
        raise ValueError(
            "the model has no chat template; use /v1/completions, or serve a folder whose tokenizer has one"
        )


class Numbers(Language):
    """Tokens as numbers, of models without a tokenizer: ``"0 3 2"``."""

    def encode(self, text: str) -> list[int]:
        """Return the numbers in a text."""
        words = text.split()
        if not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words):
            raise ValueError(
                "the model has no tokenizer for text; give token IDs, as a list of integers or as text such "
                "as '0 3 2'"
            )
        return [int(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the numbers, with spaces between them."""
        return " ".join(map(str, tokens))

    def token(self, token: int) -> str:
        """Return the number with the space before it."""
        return f" {token}"

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Return the numbers, with a space before each but the first one of a text."""
        return _NumberStream(begun=bool(prompt))


class _NumberStream:
    def __init__(self, *, begun: bool) -> None:
        self._begun = begun

    def push(self, tokens: Sequence[int]) -> str:
        text = "".join(f" {token}" for token in tokens)
        begun, self._begun = self._begun, self._begun or bool(tokens)
        return text if begun else text[1:]

    def finish(self) -> str:
        return ""


class Bytes(Language):
    """UTF-8 bytes as tokens, and 256 as the end of a text."""

    stop_token_ids = (END_OF_BYTES,)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; invalid bytes become U+FFFD."""
        return bytes(token for token in tokens if token < END_OF_BYTES).decode("utf-8", errors="replace")

    def token(self, token: int) -> str:
        """Return the character, or the byte as ``bytes:\\xe2``."""
        if token >= END_OF_BYTES:
            return "<|endoftext|>" if token == END_OF_BYTES else f"<|{token}|>"
        return chr(token) if token < 128 else f"bytes:\\x{token:02x}"

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Return the text, by whole characters."""
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in tokens if token < END_OF_BYTES))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class Words(Language):
    """The tokens of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is not None:
            self.stop_token_ids = (int(tokenizer.eos_token_id),)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, without special tokens."""
        return str(
            self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def token(self, token: int) -> str:
        """Return the text of a token; of an incomplete character, the tokenizer's own name of it."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if text and "\ufffd" not in text:
            return text
        name = self.tokenizer.convert_ids_to_tokens(token)
        return f"token:{name}" if name is not None else f"<|{token}|>"

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Return the text, by whole characters."""
        return _WordStream(self, prompt)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Apply the tokenizer's chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return super().chat(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise errors of their own, and those of the template language
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self.encode(str(text))


class _WordStream:
    """Decodes the tokens since the last whole character with those before them, which affect their spaces.

    ``_before`` is the number of tokens in ``_tokens`` that end with a whole character and were released.
    """

    def __init__(self, words: Words, prompt: Sequence[int]) -> None:
        self._words = words
        self._tokens = list(prompt[-CONTEXT:])
        self._before = len(self._tokens)
        self._released = len(words.decode(self._tokens).rstrip("\ufffd"))

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        text = self._words.decode(self._tokens)
        whole = text.rstrip("\ufffd")  # it may become a character with the bytes of the next token
        new = whole[self._released :]
        self._released = max(self._released, len(whole))
        if len(whole) == len(text) and new:
            self._tokens = self._tokens[self._before :]
            self._before = len(self._tokens)
            self._released = len(self._words.decode(self._tokens))
        return new

    def finish(self) -> str:
        return self._words.decode(self._tokens)[self._released :]


def language_of(tokenizer: Path | None, *, vocab_size: int) -> Language:
    """Return the language of a tokenizer: a file, a folder, ``bytes``, or None for numbers.

    Raises:
        ValueError: the tokenizer cannot be read, or has more tokens than the model.
        ImportError: transformers is not installed, for a tokenizer other than ``bytes``.

    """
    if tokenizer is None:
        return Numbers()
    if str(tokenizer) == BYTES:
        return Bytes()
    from implicit_blocks.hf.tokenizer import check_tokenizer_fits, load_tokenizer

    loaded = load_tokenizer(tokenizer)
    check_tokenizer_fits(loaded, vocab_size, name=tokenizer)
    return Words(loaded)
