"""Tokenize text into shards: ``python -m trainer.tokenize INPUT … --output DIR --tokenizer FILE``.

Exit codes: 0 success, 2 the request cannot be carried out (with a message), 130 interrupted. After an
interrupt, a kill or a full disk, the same command resumes after the finished shards.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from implicit_blocks._utils.programs import CommandParser
from trainer.cli.exit_codes import INTERRUPTED, refuse
from trainer.data.manifest import TRAIN, VALIDATION, read_manifest, require_finished, verify
from trainer.data.tokenizing import Documents, Job, load_tokenizer, tokenize, train_tokenizer_for
from trainer.data.tokenizing.chat import load_chat_tokenizer
from trainer.data.tokenizing.documents import Format, find_sources
from trainer.data.tokenizing.job import Result
from trainer.data.tokenizing.progress import TokenizationProgress
from trainer.data.tokenizing.tokenizers import END_OF_DOCUMENT, BytesTokenizer, Tokenizer
from trainer.reporting.display import counted


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    command = CommandParser(
        prog="python -m trainer.tokenize",
        description="Tokenize text into shards for training: data.path=OUTPUT.",
        epilog="The shards do not depend on the number of workers. Running the same command again "
        "resumes an interrupted job.",
    )
    add = command.add_argument
    # fmt: off
    add = command.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files, directories of files, or datasets: .txt .md "
        ".jsonl .json .parquet (text formats may be compressed: .xz .gz .bz2 .zst), "
        "`save_to_disk` directories; with --format dataset: Hub names")
    add("--output", type=Path, metavar="DIR", help="output directory for train/ and validation/")
    add("--tokenizer", metavar="NAME", help="a tokenizer.json, a directory that contains one, the name of a "
        "tokenizer on the Hugging Face Hub, or 'bytes'")
    add("--train-tokenizer", type=int, metavar="SIZE", help="first train a byte-level BPE tokenizer of "
        "SIZE IDs on the training documents, and save it as DIR/tokenizer.json")
    add("--special-tokens", nargs="+", default=[], metavar="TOKEN", help="further tokens of "
        "--train-tokenizer, such as those of a chat template")
    add("--end-of-document", metavar="TOKEN", help="token appended to each document (default: "
        "the tokenizer's end-of-text token)")
    add("--format", choices=get_args(Format), default="auto", help="input format (default: by file suffix)")
    add("--separator", metavar="TEXT", help="text files: separator between documents")
    add("--chat", action="store_true", help="read conversations: rows with messages, or with prompt and "
        "completion; only answers are targets (data.kind=chat)")
    add("--chat-template", metavar="FILE", help="Jinja template of conversations, or 'chatml' (default: the "
        "tokenizer's own)")
    add("--text-field", metavar="NAME", help="jsonl, parquet, datasets: field with the text (default: text)")
    add("--split", metavar="NAME", help="datasets: split to read (default: train)")
    add("--config", metavar="NAME", help="Hub datasets: configuration name")
    add("--validation", nargs="+", default=[], metavar="INPUT", help="held-out inputs")
    add("--validation-split", metavar="NAME", help="datasets: held-out split of the same inputs")
    add("--validation-fraction", type=float, default=0.0, metavar="SHARE", help="fraction of the "
        "documents to hold out, selected by their text and --seed; of a single document, its end")
    add("--validation-gap", type=int, default=0, metavar="N", help="characters of a single document to leave "
        "out before its held-out end (default: 0)")
    add("--seed", type=int, metavar="N", help="seed of that selection (default: 0)")
    add("--workers", type=int, metavar="N", help="number of processes (default: one per core)")
    add("--shard-tokens", type=float, default=float(1 << 27), metavar="N", help="tokens per shard, about")
    add("--verify", action="store_true", help="only verify the checksums of the directories INPUT")
    # fmt: on
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    command = parser()
    options = command.parse_args(arguments)
    if not options.verify:
        if options.output is None:
            command.error("--output is required")
        if (options.tokenizer is None) == (options.train_tokenizer is None):
            command.error("give either --tokenizer FILE or --train-tokenizer SIZE")
    try:
        if options.verify:
            return _verify(options.inputs)
        with TokenizationProgress(sys.stderr) as progress:
            _tokenize(options, progress)
        return 0
    except (ValueError, OSError, ImportError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        return refuse("interrupted; run the same command to resume after the finished shards", INTERRUPTED)


def _tokenize(options: argparse.Namespace, progress: TokenizationProgress) -> None:
    split = options.split or "train"
    documents = _documents(options, options.inputs, split)
    validation = None
    if options.validation and options.validation_split:
        raise ValueError("give either --validation or --validation-split, not both")
    if options.validation or options.validation_split:
        inputs = options.validation or options.inputs
        validation = _documents(options, inputs, options.validation_split or split)
    _require_used(options, documents, validation)
    job = Job(
        output=options.output,
        documents=documents,
        tokenizer=BytesTokenizer(),
        validation=validation,
        validation_fraction=options.validation_fraction,
        validation_gap=options.validation_gap,
        seed=options.seed or 0,
        shard_tokens=int(options.shard_tokens),
        workers=options.workers if options.workers is not None else len(_cores()),
    )
    job.check()  # before a tokenizer is trained
    job = replace(job, tokenizer=_tokenizer(options, documents, progress))
    results = tokenize(job, log=progress.log, report=progress.report)
    for result in results:
        shards = f"{counted(result.documents, 'document')}, {counted(result.shards, 'shard')}"
        progress.log(f"{result.folder}: {counted(result.tokens, 'token')}, {shards}")
    _log_separator(job, results, progress)
    progress.log(f"vocabulary {job.tokenizer.vocab_size:,}, {job.dtype}")


def _require_used(options: argparse.Namespace, documents: Documents, validation: Documents | None) -> None:
    """Reject options without an effect on these inputs, and invalid numbers."""
    formats = {
        source.format for part in (documents, validation) if part is not None for source in part.sources
    }
    if options.chat and options.train_tokenizer is not None:
        raise ValueError(
            "--train-tokenizer learns from plain text, not from conversations; give the tokenizer of the "
            "model that you fine-tune by --tokenizer"
        )
    for option, value, unused, applies in (
        (
            "--special-tokens",
            " ".join(options.special_tokens) or None,
            options.train_tokenizer is None,
            "adds tokens to a tokenizer that --train-tokenizer trains",
        ),
        ("--chat-template", options.chat_template, not options.chat, "renders the conversations of --chat"),
        ("--separator", options.separator, "text" not in formats, "separates documents in text files"),
        (
            "--text-field",
            options.text_field,
            formats == {"text"} or options.chat,
            "selects a field with text in jsonl, parquet or datasets",
        ),
        ("--split", options.split, "dataset" not in formats, "selects a split of a dataset"),
        ("--config", options.config, "dataset" not in formats, "selects a configuration of a dataset"),
        (
            "--seed",
            options.seed,
            not options.validation_fraction,
            "selects the documents of --validation-fraction",
        ),
    ):
        if value is not None and unused:
            raise ValueError(f"{option} {value!r} has no effect on these inputs: it {applies}; omit it")
    if not 1 <= options.shard_tokens < float("inf"):
        raise ValueError(f"--shard-tokens must be at least 1, got {options.shard_tokens:g}")


def _log_separator(job: Job, results: Sequence[Result], progress: TokenizationProgress) -> None:
    """Log a message if the separator occurs in no text file, for example an unescaped line break."""
    parts = [part for part in (job.documents, job.validation) if part is not None]
    sources = [source for part in parts for source in part.sources]
    separator = job.documents.separator
    if separator is None or any(source.format != "text" for source in sources):
        return
    if sum(result.documents for result in results) <= len(sources):
        hint = "; in a shell, write a line break as $'\\n'" if "\\" in separator else ""
        progress.log(f"the separator {separator!r} occurs in no file: each file is one document{hint}")


def _documents(options: argparse.Namespace, inputs: Sequence[str], split: str) -> Documents:
    return Documents(
        sources=find_sources(inputs, format=options.format),
        separator=options.separator,
        text_field=options.text_field or "text",
        dataset_split=split,
        dataset_config=options.config,
        chat=options.chat,
    )


def _tokenizer(
    options: argparse.Namespace, documents: Documents, progress: TokenizationProgress
) -> Tokenizer:
    if options.tokenizer is not None:
        loaded = load_tokenizer(options.tokenizer, end_of_document=options.end_of_document)
        if not options.chat:
            return loaded
        return load_chat_tokenizer(loaded, options.tokenizer, template=options.chat_template)
    if options.end_of_document not in (None, END_OF_DOCUMENT):
        raise ValueError(
            f"--train-tokenizer ends documents with {END_OF_DOCUMENT}, not with "
            f"{options.end_of_document!r}; omit --end-of-document"
        )
    return train_tokenizer_for(
        options.output,
        documents,
        vocab_size=options.train_tokenizer,
        special_tokens=options.special_tokens,
        validation_gap=options.validation_gap,
        validation_fraction=options.validation_fraction,
        seed=options.seed or 0,
        log=progress.log,
        report=progress.report,
    )


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _verify(folders: Sequence[str]) -> int:
    for name in folders:
        folder = Path(name)
        require_finished(folder)
        parts = [part for part in (folder / TRAIN, folder / VALIDATION) if part.is_dir()]
        for part in parts or [folder]:
            manifest = read_manifest(part)
            if manifest is None:
                raise ValueError(f"{part} has no manifest.json to verify it against")
            size = verify(part, again=True)
            print(f"{part}: {manifest['tokens']:,} tokens, {size:,} bytes verified")
    return 0
