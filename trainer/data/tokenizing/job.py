"""The job: documents in, shards out, by several processes, going on where a killed run stopped.

This process reads and writes; others tokenize (``workers``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.manifest import JOB, MANIFEST, TRAIN, VALIDATION, read_manifest, verify
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

_TASK = 1 << 20  # characters handed to a process at once
_OURS = (LOCK, "tokenizer.json", "tokenizer_training.json")

Log = Callable[[str], None]
Report = Callable[[float, int, int], None]
"""Hears the share of the inputs that has been read, and the documents and tokens written."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to tokenize, and how.

    Args:
        output: folder to write ``train`` and, where text is held out, ``validation`` into.
        documents: to train on.
        tokenizer: makes the ids.
        validation: held-out documents, from inputs of their own.
        validation_fraction: or the share of `documents` to hold out, by document: which side a document is on
            depends on its text and `seed` alone, so exact copies stay together. The end of a single document.
        seed: of the choice; 0 to 2^64 - 1.
        shard_tokens: tokens from which on a shard is closed.
        workers: processes; the shards don't depend on it.

    """

    output: Path
    documents: Documents
    tokenizer: Tokenizer
    validation: Documents | None = None
    validation_fraction: float = 0.0
    seed: int = 0
    shard_tokens: int = 1 << 27
    workers: int = 1

    def check(self) -> None:
        """Refuse what can't be done.

        Raises:
            ValueError: says what.

        """
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation fraction {self.validation_fraction} is no share; give 0 to below 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed {self.seed} is out of range; give 0 to 2**64 - 1")
        if self.validation is not None and self.validation_fraction:
            raise ValueError("give validation inputs or a validation fraction, not both")
        if self.validation is not None:
            self.documents.require_apart(self.validation)
        for what, documents in (("inputs", self.documents), ("held-out inputs", self.validation)):
            if documents is not None and next(documents.pieces(), None) is None:
                raise ValueError(f"the {what} hold no text: {_names(documents)}")
        for name, value in (("workers", self.workers), ("shard_tokens", self.shard_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")

    @property
    def dtype(self) -> Dtype:
        """The smaller type that holds the vocabulary."""
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    def record(self) -> dict[str, Any]:
        """Say everything that the shards depend on."""
        sides = {TRAIN: self.documents, VALIDATION: self.validation}
        return {
            "tokenizer": self.tokenizer.identity,
            "vocab_size": self.tokenizer.vocab_size,
            "shard_tokens": self.shard_tokens,
            "validation_fraction": self.validation_fraction,
            "seed": self.seed if self.validation_fraction else None,
            **{side: described(documents) for side, documents in sides.items() if documents is not None},
        }


class Result(NamedTuple):
    """What stands in a split's folder at the end."""

    folder: Path
    tokens: int
    documents: int
    shards: int


def tokenize(
    job: Job, *, log: Log = print, report: Report = lambda share, documents, tokens: None
) -> list[Result]:
    """Write the shards of a job, or what is missing of them.

    A run that was stopped at any moment is gone on with by the same call: finished shards are checked against
    their checksums and kept, the rest is done again. The result is the same to the byte.

    Raises:
        ValueError: something is wrong with the job or its inputs; the folder holds something else, or is in
            use.
        DiskFullError: there is no room.

    """
    job.check()
    job.output.mkdir(parents=True, exist_ok=True)
    with locked(job.output):
        _begin(job)
        with encoders(job.tokenizer, dtype=job.dtype, workers=job.workers) as encode:
            if job.validation_fraction:
                split = find_split(job.documents, fraction=job.validation_fraction, seed=job.seed)
                if isinstance(split, AtPosition):
                    log(f"one document: its end is held out, about {split.held_out:,} characters")
                return _convert(job, job.documents, split, [TRAIN, VALIDATION], encode, log, report)
            repeats = None if job.validation is None else Repeats(job.validation)
            watch = None if repeats is None else repeats.watch
            results = _convert(job, job.documents, OneSide(TRAIN), [TRAIN], encode, log, report, watch)
            if job.validation is not None:
                if repeats is not None and repeats.count:
                    log(
                        f"WARNING: {repeats.count:,} of {results[0].documents:,} training documents equal "
                        "held-out documents, which are therefore not unseen text"
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
        return [_kept(folder, log) for folder in folders.values()]
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
        for task, (ids, lengths) in encode(_tasks(pieces, done)):
            start = 0
            for side, number, ends, length in zip(task.sides, task.numbers, task.ends, lengths, strict=True):
                writers[side].add(ids[start : start + length], ends=ends, piece=number)
                start += length
            report(
                share,
                sum(writer.documents for writer in writers.values()),
                sum(writer.tokens for writer in writers.values()),
            )
        if not all(writer.tokens for writer in writers.values()):
            _abandon(job, writers.values())
            require_both_sides({side: writer.documents for side, writer in writers.items()})
        for side, writer in writers.items():
            writer.close({"split": side, "tokenizer": job.tokenizer.identity, "from": described(documents)})
    finally:
        for writer in writers.values():
            writer.discard()
    return [_result(folder) for folder in folders.values()]


def _abandon(job: Job, writers: Iterable[ShardWriter]) -> None:
    """Remove what has been written: no other options could continue with it."""
    for writer in writers:
        writer.discard()
        for path in writer.folder.glob("shard_*"):
            path.unlink()
        with contextlib.suppress(OSError):  # there are other files
            writer.folder.rmdir()
    (job.output / JOB).unlink()


def _counted(pieces: Iterator[tuple[str, Piece]], *, least: int, output: Path) -> Iterator[tuple[str, Piece]]:
    """Refuse inputs that end before what the finished shards hold: they are not what they were."""
    count = 0
    for assigned in pieces:
        count += 1
        yield assigned
    if count < least:
        raise ValueError(
            f"the inputs have {count} pieces of text, but the finished shards in {output} were made of "
            f"{least}: they have changed meanwhile; name another folder by --output"
        )


def _tasks(pieces: Iterator[tuple[str, Piece]], done: dict[str, int]) -> Iterator[Task]:
    """Put pieces together to tasks, leaving out those whose shards are finished."""
    task, size = Task([], [], [], []), 0
    for number, (side, piece) in enumerate(pieces):
        if number < done[side]:
            continue
        task.sides.append(side)
        task.numbers.append(number)
        task.texts.append(piece.text)
        task.ends.append(piece.ends)
        size += len(piece.text)
        if size >= _TASK or len(task.texts) >= 4096:
            yield task
            task, size = Task([], [], [], []), 0
    if task.texts:
        yield task


def described(documents: Documents) -> dict[str, Any]:
    """Say what documents are, to notice that they have changed."""
    return {
        "inputs": [source.fingerprint() for source in documents.sources],
        "separator": documents.separator,
        "text_field": documents.text_field,
        "dataset_split": documents.dataset_split,
        "dataset_config": documents.dataset_config,
    }


def _result(folder: Path) -> Result:
    manifest = read_manifest(folder)
    assert manifest is not None
    return Result(folder, manifest["tokens"], manifest["documents"], len(manifest["shards"]))


def _kept(folder: Path, log: Log) -> Result:
    verify(folder, again=True)
    log(f"{folder} is finished; its checksums are right")
    return _result(folder)


# ------------------------------------------------------------------------------------------ the folder


def _begin(job: Job) -> None:
    """Write down what the folder is for, or check that it is for this."""
    path, record = job.output / JOB, job.record()
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(before, dict):
                raise ValueError(f"it holds a {type(before).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} can't be read ({error}); remove the folder and begin anew") from error
        changed = sorted(key for key in before.keys() | record.keys() if before.get(key) != record.get(key))
        if changed:
            first = changed[0]
            raise ValueError(
                f"{job.output} was begun with other {', '.join(changed)} "
                f"({first} was {_short(before.get(first))}, is {_short(record.get(first))}); give the same "
                "again, or another folder by --output"
            )
    else:
        others = sorted(p.name for p in job.output.iterdir() if p.name not in _OURS)
        if others:
            raise ValueError(
                f"{job.output} holds other files ({others[0]}); name an empty folder by --output"
            )
        _require_tokenizer(job)
        write_json(path, record)
    if isinstance(job.tokenizer, FileTokenizer):
        write_atomically(job.output / "tokenizer.json", job.tokenizer.content)


def _require_tokenizer(job: Job) -> None:
    """Refuse a folder with another tokenizer: whatever reads its tokens would take that for theirs."""
    file = job.output / "tokenizer.json"
    if not file.is_file():
        return
    try:
        there: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        there = None
    if not isinstance(job.tokenizer, FileTokenizer) or there != json.loads(job.tokenizer.content):
        raise ValueError(
            f"{file} is another tokenizer than that of these tokens; remove it, or name another folder by "
            "--output"
        )


def _names(documents: Documents) -> str:
    names = [source.name for source in documents.sources]
    return ", ".join(names if len(names) <= 3 else [*names[:3], f"and {len(names) - 3} more"])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse to write into a folder that another process is writing into."""
    try:
        lock = FolderLock(folder / LOCK)
    except LockedError as error:
        raise ValueError(
            f"another process is writing into {folder} ({error.holder}); wait for it, or stop it"
        ) from None
    with lock:
        yield
