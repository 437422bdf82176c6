"""Descriptions of the data for a dry run, with checks. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.chat_rows import ChatRows
from trainer.data.token_folder import (
    TokenFolder,
    check_same_tokenizer,
    check_tokens,
    open_tokens,
    validation_folder,
)
from trainer.reporting.display import counted

if TYPE_CHECKING:
    from trainer.specs.data import ChatSpec, StreamSpec, TokensSpec


def describe_tokens(spec: TokensSpec, *, sequences: int, vocab_size: int | None) -> list[str]:
    """Describe the amount of text and the number of epochs in a run; see `DataSpec.describe`."""
    if spec.path is None:
        return [f"tokens, length {spec.seq_len:,}; the path is not set: data.path=DIR"]
    training = open_tokens(spec.path, dtype=spec.dtype, check_sums=spec.check_sums)
    check_tokens(
        training,
        length=spec.seq_len,
        vocab_size=vocab_size,
        documents=spec.documents,
        tokenizer=spec.tokenizer,
    )
    samples = (training.tokens - 1) // spec.seq_len
    epochs = f"the run takes {sequences / samples:.2f} epochs"
    lines = [f"training: {_amount(training)}; {epochs}"]
    held_out = validation_folder(spec.path, spec.validation_path)
    if held_out is None:
        lines.append(
            "validation: none, so evaluation is skipped; tokenize with --validation or "
            "--validation-fraction, or set data.validation_path"
        )
    else:
        validation = open_tokens(held_out, dtype=spec.dtype, check_sums=spec.check_sums)
        check_same_tokenizer(training, validation)
        same = ": identical to the training tokens" if held_out.resolve() == training.path.resolve() else ""
        lines.append(f"validation: {_amount(validation)}{same}")
    size, where = training.vocab_size, "the data"
    if size is None:
        beginning = training.read(0, min(training.tokens, 2**20), vocab_size=vocab_size)
        size, where = 1 + int(beginning.max()), f"the first {counted(len(beginning), 'token')}"
    if vocab_size is not None and 2 * size < vocab_size:
        lines.append(f"vocabulary: {size:,} in {where}, {vocab_size:,} in the model (model.vocab_size)")
    if spec.documents == "reset":
        lines.append("documents are separated: states and attention are reset at each")
    return lines


def count_sequences(spec: TokensSpec) -> int:
    """Return the number of training sequences per epoch.

    Raises:
        ValueError: the path is missing, or the tokens are fewer than one sequence.

    """
    if spec.path is None:
        raise ValueError("data.path is not set; give a token file or a directory of them, data.path=PATH")
    training = open_tokens(spec.path, dtype=spec.dtype)
    check_tokens(
        training, length=spec.seq_len, vocab_size=None, documents=spec.documents, tokenizer=spec.tokenizer
    )
    return (training.tokens - 1) // spec.seq_len


def open_chat(spec: ChatSpec, *, vocab_size: int | None, path: Path | None = None) -> ChatRows:
    """Open the rows of conversations, of another path if given.

    Raises:
        ValueError: the path is missing, or the conversations cannot be used.

    """
    if path is None and spec.path is None:
        raise ValueError("data.path is not set; give a directory of conversations, data.path=PATH")
    files = open_tokens(path or spec.path or "", check_sums=spec.check_sums)
    check_tokens(files, length=1, vocab_size=vocab_size, documents="reset", tokenizer=spec.tokenizer)
    return ChatRows(files, length=spec.seq_len, packing=spec.packing, scoring=spec.scoring)


def describe_chat(spec: ChatSpec, *, sequences: int, vocab_size: int | None) -> list[str]:
    """Describe the conversations, their packing, and the number of epochs; see `DataSpec.describe`."""
    if spec.path is None:
        return [f"chat, length {spec.seq_len:,}; the path is not set: data.path=DIR"]
    training = open_chat(spec, vocab_size=vocab_size)
    epochs = f"the run takes {sequences / len(training):.2f} epochs"
    lines = [f"training: {_conversations(training)}; {epochs}"]
    held_out = validation_folder(spec.path, spec.validation_path)
    if held_out is None:
        lines.append("validation: none, so evaluation is skipped; set data.validation_path")
    else:
        validation = open_chat(spec, vocab_size=vocab_size, path=held_out)
        check_same_tokenizer(training.files, validation.files)
        lines.append(f"validation: {_conversations(validation)}")
    scored = "the answers have" if spec.scoring == "answers" else "every token has"
    lines.append(f"{scored} labels; no token sees another conversation of its row")
    return lines


def _conversations(rows: ChatRows) -> str:
    """Describe the packing of conversations, and those that are truncated or left out."""
    parts = [
        f"{counted(rows.conversations, 'conversation')} in {counted(len(rows), 'row')} of {rows.length:,} "
        f"tokens, {rows.filled:.0%} filled"
    ]
    if rows.truncated:
        parts.append(f"{rows.truncated:,} longer than a row and truncated")
    if rows.dropped:
        parts.append(f"{rows.dropped:,} left out because no answer remains")
    return f"{', '.join(parts)}, of {rows.files.path}"


def describe_stream(spec: StreamSpec, *, vocab_size: int | None) -> list[str]:
    """Describe a stream without reading it; see `DataSpec.describe`."""
    from trainer.data.tokenizing.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(spec.tokenizer, end_of_document=spec.end_of_document)
    check_vocabulary(tokenizer.vocab_size, vocab_size, what=f"tokenizer {spec.tokenizer}")
    return [
        f"stream of dataset {spec.dataset}, split {spec.split}, length {spec.seq_len:,}, of unknown size",
        f"vocabulary {tokenizer.vocab_size:,}; resuming is approximate",
    ]


def check_vocabulary(needed: int, vocab_size: int | None, *, what: str) -> None:
    """Reject a model whose vocabulary is smaller than that of its data.

    Raises:
        ValueError: names both sizes.

    """
    if vocab_size is not None and vocab_size < needed:
        raise ValueError(
            f"{what} has {needed} IDs, but the model has vocab_size {vocab_size}; set "
            f"model.vocab_size={needed}"
        )


def _amount(tokens: TokenFolder) -> str:
    documents = "" if tokens.documents is None else f", {counted(tokens.documents, 'document')}"
    files = counted(len(tokens.shards), "file")
    return f"{counted(tokens.tokens, 'token')}{documents} in {files} of {tokens.path}"
