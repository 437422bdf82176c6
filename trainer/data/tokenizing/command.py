"""Text into token shards: ``python -m trainer.tokenize INPUT … --output DIR --tokenizer FILE``.

Exit codes: 0 done, 2 the request can't be carried out (said in a sentence), 130 interrupted. After an
interrupt, a kill or a full disk the same command goes on with the finished shards.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from trainer.cli.exit_codes import INTERRUPTED, refuse
from trainer.data.manifest import TRAIN, VALIDATION, read_manifest, require_finished, verify
from trainer.data.tokenizing import Documents, Job, load_tokenizer, tokenize, train_tokenizer_for
from trainer.data.tokenizing.documents import Format, find_sources
from trainer.data.tokenizing.job import Result
from trainer.data.tokenizing.progress import TokenizationProgress
from trainer.data.tokenizing.tokenizers import END_OF_DOCUMENT, BytesTokenizer, Tokenizer
from trainer.reporting.display import counted


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m trainer.tokenize",
        description="Turn text into token shards to train on: data.path=OUTPUT.",
        epilog="The shards depend on the inputs and the options, not on the number of workers; the same "
        "command goes on with a run that was stopped.",
    )
    # fmt: off
    add = made.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files, folders of files, or datasets: .txt .md .jsonl "
        ".json .parquet (.xz .gz .bz2 .zst of the text formats), folders of `save_to_disk`; with --format "
        "dataset names on the hub")
    add("--output", type=Path, metavar="DIR", help="folder to write train/ and validation/ into")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, a folder that holds one, or 'bytes'")
    add("--train-tokenizer", type=int, metavar="SIZE", help="train a byte-level BPE tokenizer of so many ids "
        "on the inputs first, without what is held out, and keep it as DIR/tokenizer.json")
    add("--end-of-document", metavar="TOKEN", help="appended to each document (default: the usual token)")
    add("--format", choices=get_args(Format), default="auto", help="of the inputs (default: by their names)")
    add("--separator", metavar="TEXT", help="text files: what stands between documents")
    add("--text-field", metavar="NAME", help="jsonl, parquet, datasets: where the text is (text)")
    add("--split", metavar="NAME", help="datasets: which split (train)")
    add("--config", metavar="NAME", help="datasets of the hub: which configuration")
    add("--validation", nargs="+", default=[], metavar="INPUT", help="held-out inputs")
    add("--validation-split", metavar="NAME", help="datasets: a held-out split of the same inputs")
    add("--validation-fraction", type=float, default=0.0, metavar="SHARE", help="or the share of the "
        "documents to hold out, chosen by their text and --seed; of a single document its end")
    add("--seed", type=int, metavar="N", help="of that choice (0)")
    add("--workers", type=int, metavar="N", help="processes (default: one a core)")
    add("--shard-tokens", type=float, default=float(1 << 27), metavar="N", help="tokens in a shard, about")
    add("--verify", action="store_true", help="only check the checksums of the token folders given as INPUT")
    # fmt: on
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    command = parser()
    options = command.parse_args(arguments)
    if not options.verify:
        if options.output is None:
            command.error("give a folder to write to by --output")
        if (options.tokenizer is None) == (options.train_tokenizer is None):
            command.error("give either --tokenizer FILE or --train-tokenizer SIZE")
    try:
        if options.verify:
            return _verify(options.inputs)
        with TokenizationProgress(sys.stderr) as progress:
            _tokenize(options, progress)
        return 0
    except (ValueError, OSError) as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return refuse("stopped; the same command goes on with the finished shards", INTERRUPTED)


def _tokenize(options: argparse.Namespace, progress: TokenizationProgress) -> None:
    split = options.split or "train"
    documents = _documents(options, options.inputs, split)
    validation = None
    if options.validation and options.validation_split:
        raise ValueError("give --validation or --validation-split, not both")
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
    """Refuse options without an effect on these inputs, and numbers that are none."""
    formats = {
        source.format for part in (documents, validation) if part is not None for source in part.sources
    }
    for option, value, unused, applies in (
        ("--separator", options.separator, "text" not in formats, "divides text files"),
        (
            "--text-field",
            options.text_field,
            formats == {"text"},
            "names a field of jsonl, parquet, datasets",
        ),
        ("--split", options.split, "dataset" not in formats, "names a split of a dataset"),
        ("--config", options.config, "dataset" not in formats, "names a configuration of a dataset"),
        (
            "--seed",
            options.seed,
            not options.validation_fraction,
            "chooses what --validation-fraction holds out",
        ),
    ):
        if value is not None and unused:
            raise ValueError(f"{option} {value!r} has no effect here: it {applies}; leave it out")
    if not 1 <= options.shard_tokens < float("inf"):
        raise ValueError(f"--shard-tokens is {options.shard_tokens:g}; give 1 or more")


def _log_separator(job: Job, results: Sequence[Result], progress: TokenizationProgress) -> None:
    """Say so where a separator was in no text file, such as a line break that stayed two letters."""
    parts = [part for part in (job.documents, job.validation) if part is not None]
    sources = [source for part in parts for source in part.sources]
    separator = job.documents.separator
    if separator is None or any(source.format != "text" for source in sources):
        return
    if sum(result.documents for result in results) <= len(sources):
        hint = "; in a shell a line break is $'\\n'" if "\\" in separator else ""
        progress.log(f"the separator {separator!r} divides no file: each is one document{hint}")


def _documents(options: argparse.Namespace, inputs: Sequence[str], split: str) -> Documents:
    return Documents(
        sources=find_sources(inputs, format=options.format),
        separator=options.separator,
        text_field=options.text_field or "text",
        dataset_split=split,
        dataset_config=options.config,
    )


def _tokenizer(
    options: argparse.Namespace, documents: Documents, progress: TokenizationProgress
) -> Tokenizer:
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer, end_of_document=options.end_of_document)
    if options.end_of_document not in (None, END_OF_DOCUMENT):
        raise ValueError(
            f"a tokenizer trained here ends documents with {END_OF_DOCUMENT}, not with "
            f"{options.end_of_document!r}; leave --end-of-document out"
        )
    return train_tokenizer_for(
        options.output,
        documents,
        vocab_size=options.train_tokenizer,
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
                raise ValueError(f"{part} has no manifest.json, so there is nothing to check it against")
            size = verify(part, again=True)
            print(f"{part}: {manifest['tokens']:,} tokens, {size:,} bytes as they were written")
    return 0
