"""Data in words, checked, for a dry run. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.token_folder import (
    TokenFolder,
    check_same_tokenizer,
    check_tokens,
    open_tokens,
    validation_folder,
)
from trainer.reporting.display import counted

if TYPE_CHECKING:
    from trainer.specs.data import StreamSpec, TokensSpec


def describe_tokens(spec: TokensSpec, *, sequences: int, vocab_size: int | None) -> list[str]:
    """Say how much text there is, and how often a run goes through it; see `DataSpec.describe`."""
    if spec.path is None:
        return [f"tokens, length {spec.seq_len:,}; where they are is not set: data.path=DIR"]
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
            "validation: none, so nothing is evaluated; tokenize with --validation or --validation-fraction, "
            "or set data.validation_path"
        )
    else:
        validation = open_tokens(held_out, dtype=spec.dtype, check_sums=spec.check_sums)
        check_same_tokenizer(training, validation)
        same = ": the training tokens themselves" if held_out.resolve() == training.path.resolve() else ""
        lines.append(f"validation: {_amount(validation)}{same}")
    if training.vocab_size is not None and vocab_size is not None and 2 * training.vocab_size < vocab_size:
        lines.append(
            f"vocabulary {training.vocab_size:,}, of the model {vocab_size:,}: model.vocab_size says so"
        )
    if spec.documents == "reset":
        lines.append("documents are kept apart: states and attention begin anew with each")
    return lines


def describe_stream(spec: StreamSpec, *, vocab_size: int | None) -> list[str]:
    """Say what is streamed; nothing of it is read; see `DataSpec.describe`."""
    from trainer.data.tokenizing.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(spec.tokenizer, end_of_document=spec.end_of_document)
    check_vocabulary(tokenizer.vocab_size, vocab_size, what=f"tokenizer {spec.tokenizer}")
    return [
        f"stream of dataset {spec.dataset}, split {spec.split}, length {spec.seq_len:,}: its size isn't "
        "known",
        f"vocabulary {tokenizer.vocab_size:,}; where a run is resumed is approximate",
    ]


def check_vocabulary(needed: int, vocab_size: int | None, *, what: str) -> None:
    """Refuse a model whose vocabulary is smaller than that of its data.

    Raises:
        ValueError: says both.

    """
    if vocab_size is not None and vocab_size < needed:
        raise ValueError(
            f"{what} has {needed} ids, but the model has vocab_size {vocab_size}; "
            f"set model.vocab_size={needed}"
        )


def _amount(tokens: TokenFolder) -> str:
    documents = "" if tokens.documents is None else f", {counted(tokens.documents, 'document')}"
    files = counted(len(tokens.shards), "file")
    return f"{counted(tokens.tokens, 'token')}{documents} in {files} of {tokens.path}"
