"""The tokenization job: parallel and resumable, from documents to shards.

This process reads documents and writes shards; worker processes tokenize (``workers``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from implicit_blocks.checkpoints.find import TOKENIZER
from trainer.data.manifest import JOB, MANIFEST, TRAIN, VALIDATION, read_manifest, verify
from trainer.data.tokenizing.chat import ChatTokenizer
from trainer.data.tokenizing.documents import Documents
from trainer.data.tokenizing.pieces import Piece
from trainer.data.tokenizing.shards import Dtype, ShardWriter
from trainer.data.tokenizing.splits import (
    MAX_SEED,
    AtPosition,
    OneSide,
    Repeats,
    Split,
    find_split,
    require_both_sides,
)
from trainer.data.tokenizing.tokenizers import FileTokenizer, Tokenizer
from trainer.data.tokenizing.workers import Encode, Task, encoders
from trainer.reporting.display import counted
from trainer.storage.files import write_atomically, write_json
from trainer.storage.lock import LOCK, FolderLock, LockedError

_TASK = 1 << 20  # characters per task
_OWN_FILES = (LOCK, "tokenizer.json", "tokenizer_training.json")

Log = Callable[[str], None]
Report = Callable[[float, int, int], None]
"""Called with the fraction of the inputs read, and the numbers of documents and tokens written."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Inputs and options of a tokenization.

    Args:
        output: output directory for ``train`` and, if text is held out, ``validation``.
        documents: training documents.
        tokenizer: the tokenizer.
        validation: held-out documents from separate inputs.
        validation_fraction: fraction of `documents` to hold out instead. The side of a document depends only
            on its text and `seed`, so exact copies stay together; of a single document, the end is held out.
        validation_gap: characters of a single document to leave out between both sides.
        seed: seed of that selection; 0 to 2^64 - 1.
        shard_tokens: number of tokens at which a shard is closed.
        workers: number of processes; the shards do not depend on it.

    """

    output: Path
    documents: Documents
    tokenizer: Tokenizer
    validation: Documents | None = None
    validation_fraction: float = 0.0
    validation_gap: int = 0
    seed: int = 0
    shard_tokens: int = 1 << 27
    workers: int = 1

    def check(self) -> None:
        """Reject invalid options.

        Raises:
            ValueError: explains which.

        """
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation fraction must be at least 0 and below 1, got {self.validation_fraction}"
            )
        if self.validation_gap and not self.validation_fraction:
            raise ValueError("a validation gap needs a validation fraction: it lies before the held-out text")
        if self.validation_gap < 0:
            raise ValueError(f"validation gap must be at least 0, got {self.validation_gap}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed {self.seed} is out of range; use 0 to 2**64 - 1")
        if self.validation is not None and self.validation_fraction:
            raise ValueError("give validation inputs or a validation fraction, not both")
        if self.validation is not None:
            self.documents.require_apart(self.validation)
        for what, documents in (("inputs", self.documents), ("held-out inputs", self.validation)):
            if documents is not None and next(documents.pieces(), None) is None:
                raise ValueError(f"the {what} contain no text: {_names(documents)}")
        for name, value in (("workers", self.workers), ("shard_tokens", self.shard_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def dtype(self) -> Dtype:
        """Smallest integer type that fits the vocabulary."""
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    def record(self) -> dict[str, Any]:
        """Return everything that the shards depend on."""
        sides = {TRAIN: self.documents, VALIDATION: self.validation}
        return {
            "tokenizer": self.tokenizer.identity,
            "vocab_size": self.tokenizer.vocab_size,
            "shard_tokens": self.shard_tokens,
            "validation_fraction": self.validation_fraction,
            "seed": self.seed if self.validation_fraction else None,
            **({"validation_gap": self.validation_gap} if self.validation_gap else {}),
            **{side: fingerprint_of(documents) for side, documents in sides.items() if documents is not None},
        }


class Result(NamedTuple):
    """Final contents of a split's directory."""

    folder: Path
    tokens: int
    documents: int
    shards: int


def tokenize(
    job: Job, *, log: Log = print, report: Report = lambda share, documents, tokens: None
) -> list[Result]:
    """Write the shards of a job, or those that are missing.

    An interrupted job is resumed by the same call: finished shards are verified against their checksums and
        kept,
    the rest is written again. The result is identical to the byte.

    Raises:
        ValueError: the job or its inputs are invalid, or the directory contains something else or is in use.
        DiskFullError: the disk is full.

    """
    job.check()
    job.output.mkdir(parents=True, exist_ok=True)
    with locked(job.output):
        _begin(job)
        with encoders(job.tokenizer, dtype=job.dtype, workers=job.workers) as encode:
            if job.validation_fraction:
                split = find_split(
                    job.documents, fraction=job.validation_fraction, seed=job.seed, gap=job.validation_gap
                )
                if isinstance(split, AtPosition):
                    gap = f", after a gap of {split.gap:,}" if split.gap else ""
                    log(f"one document: its end is held out, about {split.held_out:,} characters{gap}")
                return _convert(job, job.documents, split, [TRAIN, VALIDATION], encode, log, report)
            repeats = None if job.validation is None else Repeats(job.validation)
            watch = None if repeats is None else repeats.watch
            results = _convert(job, job.documents, OneSide(TRAIN), [TRAIN], encode, log, report, watch)
            if job.validation is not None:
                if repeats is not None and repeats.count:
                    log(
                        f"WARNING: {repeats.count:,} of {results[0].documents:,} training documents are "
                        "identical to held-out documents, which are therefore not unseen"
                    )
                held_out = OneSide(VALIDATION)
                results += _convert(job, job.validation, held_out, [VALIDATION], encode, log, report)
            return results


# ------------------------------------------------------------------------------------------ one pass


def _convert(
    job: Job,
    documents: Documents,
    split: Split,
    sides: Sequence[str],
    encode: Encode,
    log: Log,
    report: Report,
    watch: Callable[[Iterator[Piece]], Iterator[Piece]] | None = None,
) -> list[Result]:
    """Read documents once and write each to its side."""
    folders = {side: job.output / side for side in sides}
    if all((folder / MANIFEST).is_file() for folder in folders.values()):
        return [_stored_result(folder, log) for folder in folders.values()]
    writers = {
        side: ShardWriter(
            folder,
            dtype=job.dtype,
            vocab_size=job.tokenizer.vocab_size,
            shard_tokens=job.shard_tokens,
            log=log,
        )
        for side, folder in folders.items()
    }
    kept = sum(len(writer.finished) for writer in writers.values())
    if kept:
        log(f"{counted(kept, 'finished shard')} in {job.output} kept")
    share = 0.0

    def read(now: float) -> None:
        nonlocal share
        share = now

    try:
        done = {side: writer.next_piece for side, writer in writers.items()}
        read_pieces = documents.pieces(read)
        pieces = split.assign(read_pieces if watch is None else watch(read_pieces))
        pieces = _counted(pieces, least=max(done.values()), output=job.output)
        for task, (ids, lengths, targets) in encode(_tasks(pieces, done)):
            start = 0
            for side, number, ends, length in zip(task.sides, task.numbers, task.ends, lengths, strict=True):
                span = slice(start, start + length)
                scored = None if targets is None else targets[span]
                writers[side].add(ids[span], ends=ends, piece=number, targets=scored)
                start += length
            report(
                share,
                sum(writer.documents for writer in writers.values()),
                sum(writer.tokens for writer in writers.values()),
            )
        if not all(writer.tokens for writer in writers.values()):
            for writer in writers.values():
                writer.remove()
            require_both_sides({side: writer.documents for side, writer in writers.items()})
        for side, writer in writers.items():
            writer.close(
                {"split": side, "tokenizer": job.tokenizer.identity, "from": fingerprint_of(documents)}
            )
    except ValueError:
        if not any(writer.finished for writer in writers.values()):
            _abandon(job, writers.values())  # so that the command can be corrected
        raise
    finally:
        for writer in writers.values():
            writer.discard()
    return [_result(folder) for folder in folders.values()]


def _abandon(job: Job, writers: Iterable[ShardWriter]) -> None:
    """Remove everything written, because no other options could continue from it."""
    for writer in writers:
        writer.remove()
    (job.output / JOB).unlink(missing_ok=True)
    for name in _files_of(job.tokenizer):
        if name != TOKENIZER or isinstance(job.tokenizer, ChatTokenizer):  # a trained tokenizer is reused
            (job.output / name).unlink(missing_ok=True)


def _counted(pieces: Iterator[tuple[str, Piece]], *, least: int, output: Path) -> Iterator[tuple[str, Piece]]:
    """Reject inputs that end before the text of the finished shards, because they must have changed."""
    count = 0
    for assigned in pieces:
        count += 1
        yield assigned
    if count < least:
        raise ValueError(
            f"the inputs have {count} pieces of text, but the finished shards in {output} were written from "
            f"{least}: the inputs have changed; choose another --output"
        )


def _tasks(pieces: Iterator[tuple[str, Piece]], done: dict[str, int]) -> Iterator[Task]:
    """Group pieces into tasks, skipping those whose shards are finished."""
    task, size = Task([], [], [], [], []), 0
    for number, (side, piece) in enumerate(pieces):
        if number < done[side]:
            continue
        task.sides.append(side)
        task.numbers.append(number)
        task.texts.append(piece.text)
        task.ends.append(piece.ends)
        task.places.append(piece.place)
        size += len(piece.text)
        if size >= _TASK or len(task.texts) >= 4096:
            yield task
            task, size = Task([], [], [], [], []), 0
    if task.texts:
        yield task


def fingerprint_of(documents: Documents) -> dict[str, Any]:
    """Return a description of documents, for detecting changes."""
    return {
        "inputs": [source.fingerprint() for source in documents.sources],
        "separator": documents.separator,
        "text_field": documents.text_field,
        "dataset_split": documents.dataset_split,
        "dataset_config": documents.dataset_config,
        **({"chat": True} if documents.chat else {}),
    }


def _result(folder: Path) -> Result:
    manifest = read_manifest(folder)
    assert manifest is not None
    return Result(folder, manifest["tokens"], manifest["documents"], len(manifest["shards"]))


def _stored_result(folder: Path, log: Log) -> Result:
    verify(folder, again=True)
    log(f"{folder} is finished; its checksums match")
    return _result(folder)


# ------------------------------------------------------------------------------------------ the folder


def _begin(job: Job) -> None:
    """Record the job in the output directory, or check that the existing record matches."""
    path, record = job.output / JOB, job.record()
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(before, dict):
                raise ValueError(f"it contains a {type(before).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); remove the directory and start again"
            ) from error
        changed = sorted(key for key in before.keys() | record.keys() if before.get(key) != record.get(key))
        if changed:
            first = changed[0]
            raise ValueError(
                f"{job.output} was started with different {', '.join(changed)} ({first} was "
                f"{_short(before.get(first))}, is now {_short(record.get(first))}); use the same options, "
                "or choose another --output"
            )
    else:
        others = sorted(p.name for p in job.output.iterdir() if p.name not in _OWN_FILES)
        if others:
            raise ValueError(
                f"{job.output} contains other files ({others[0]}); choose an empty directory by --output"
            )
        _require_tokenizer(job)
        write_json(path, record)
    for name, content in _files_of(job.tokenizer).items():
        write_atomically(job.output / name, content)


def _files_of(tokenizer: Tokenizer) -> Mapping[str, str]:
    """Return the files of a tokenizer, by name; none for bytes."""
    if isinstance(tokenizer, ChatTokenizer):
        return tokenizer.files()
    return (
        {TOKENIZER: tokenizer.content, **tokenizer.companions} if isinstance(tokenizer, FileTokenizer) else {}
    )


def _require_tokenizer(job: Job) -> None:
    """Reject a directory with a different tokenizer, which readers would attribute to these tokens."""
    file = job.output / "tokenizer.json"
    if not file.is_file():
        return
    try:
        there: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        there = None
    content = _files_of(job.tokenizer).get(TOKENIZER)
    if content is None or there != json.loads(content):
        raise ValueError(f"{file} is not the tokenizer of this job; remove it, or choose another --output")


def _names(documents: Documents) -> str:
    names = [source.name for source in documents.sources]
    return ", ".join(names if len(names) <= 3 else [*names[:3], f"and {len(names) - 3} more"])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an output directory against other processes."""
    try:
        lock = FolderLock(folder / LOCK)
    except LockedError as error:
        raise ValueError(
            f"another process is writing to {folder} ({error.holder}); wait for it, or stop it"
        ) from None
    with lock:
        yield
