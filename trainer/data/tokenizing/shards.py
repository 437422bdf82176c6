"""Writing shards: each is written atomically, and is finished once its sidecar exists."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.data.manifest import DOCUMENTS_SUFFIX, FORMAT, MANIFEST, TARGETS_SUFFIX
from trainer.storage.files import fsync_path, open_own, sha256_of, write_json

Dtype = Literal["uint16", "uint32"]
Targets = npt.NDArray[np.uint8]
"""1 at the tokens that are targets, 0 elsewhere."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """The disk is full; finished shards are kept."""


@dataclass(frozen=True, kw_only=True)
class FinishedShard:
    """A finished shard; `next_piece` is the number of input pieces up to its end."""

    file: str
    tokens: int
    documents: int
    sha256: str
    documents_sha256: str
    next_piece: int
    targets_sha256: str | None = None
    """Checksum of the target tokens; None for text, of which every token is a target."""

    def as_json(self) -> dict[str, Any]:
        """Return the shard's fields that are set."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def as_manifest(self) -> dict[str, Any]:
        """Return the shard's manifest entry."""
        return {key: value for key, value in self.as_json().items() if key != "next_piece"}


class ShardWriter:
    """Writes IDs consecutively into the shards of a directory.

    A shard is closed by the first piece that brings it to at least `shard_tokens` tokens, so shard boundaries
    depend only on the IDs.

    Args:
        folder: output directory, created if missing; writing resumes after its finished shards.
        dtype: type of the IDs.
        vocab_size: vocabulary size for the sidecars.
        shard_tokens: see above.
        log: receives a message for each shard that has changed and is written again.

    """

    def __init__(
        self, folder: Path, *, dtype: Dtype, vocab_size: int, shard_tokens: int, log: Callable[[str], None]
    ) -> None:
        self.folder, self._shard_tokens = folder, shard_tokens
        self._dtype, self._vocab_size = dtype, vocab_size
        folder.mkdir(parents=True, exist_ok=True)
        self.finished = _finished(folder, dtype=dtype, vocab_size=vocab_size, log=log)
        self.next_piece = self.finished[-1].next_piece if self.finished else 0
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._tokens, self._ends, self._targets = 0, list[int](), list[Targets]()

    @property
    def tokens(self) -> int:
        """Number of tokens written so far, including unfinished shards."""
        return sum(shard.tokens for shard in self.finished) + self._tokens

    @property
    def documents(self) -> int:
        """Number of documents ended so far."""
        return sum(shard.documents for shard in self.finished) + len(self._ends)

    def add(
        self, ids: npt.NDArray[np.integer[Any]], *, ends: bool, piece: int, targets: Targets | None = None
    ) -> None:
        """Append the IDs of a piece, with index `piece` among all input pieces, and which are targets.

        Raises:
            DiskFullError: the disk is full.

        """
        data = ids.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes()
        with self._room():
            if self._file is None:
                self._file = _create(self._temporary(".bin"))
            self._file.write(data)
        self._hash.update(data)
        self._tokens += len(ids)
        if targets is not None:
            self._targets.append(targets)
        if ends:
            self._ends.append(self._tokens)
        self.next_piece = piece + 1
        if self._tokens >= self._shard_tokens:
            self._finish()

    def close(self, description: dict[str, Any]) -> None:
        """Finish the last shard and write the manifest, which extends `description`.

        Raises:
            DiskFullError: the disk is full.
            ValueError: nothing has been written.

        """
        if self._tokens:
            self._finish()
        if not self.finished:
            raise ValueError(
                f"no document was written to {self.folder}; give more text, or a larger fraction"
            )
        manifest = {
            "format": FORMAT,
            **description,
            "dtype": self._dtype,
            "vocab_size": self._vocab_size,
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": [shard.as_manifest() for shard in self.finished],
        }
        with self._room():
            write_json(self.folder / MANIFEST, manifest)

    def _finish(self) -> None:
        assert self._file is not None
        others = {DOCUMENTS_SUFFIX: np.array(self._ends, dtype="<i8").tobytes()}
        if self._targets:
            others[TARGETS_SUFFIX] = np.concatenate(self._targets).astype(np.uint8).tobytes()
        sums = {suffix: hashlib.sha256(content).hexdigest() for suffix, content in others.items()}
        name = self._name
        with self._room():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            for suffix, content in others.items():
                with _create(self._temporary(suffix)) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for suffix in (".bin", *others):
                self._temporary(suffix).replace(self.folder / f"{name}{suffix}")
            fsync_path(self.folder)
            shard = FinishedShard(
                file=f"{name}.bin",
                tokens=self._tokens,
                documents=len(self._ends),
                sha256=self._hash.hexdigest(),
                documents_sha256=sums[DOCUMENTS_SUFFIX],
                next_piece=self.next_piece,
                targets_sha256=sums.get(TARGETS_SUFFIX),
            )
            of_ids = {"dtype": self._dtype, "count": self._tokens, "vocab_size": self._vocab_size}
            # Written last: it marks the shard as finished.
            write_json(self.folder / f"{name}.json", {**of_ids, **shard.as_json()})
        self.finished.append(shard)
        self._file, self._hash, self._tokens = None, hashlib.sha256(), 0
        self._ends, self._targets = [], []

    def discard(self) -> None:
        """Remove unfinished files."""
        if self._file is not None:
            with suppress(OSError):  # buffered data may not fit on the disk
                self._file.close()
        for suffix in (".bin", DOCUMENTS_SUFFIX, TARGETS_SUFFIX):
            self._temporary(suffix).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all shards, and the directory unless it has other files."""
        self.discard()
        self.finished.clear()
        for path in self.folder.glob("shard_*"):
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    @property
    def _name(self) -> str:
        return f"shard_{len(self.finished):05d}"

    def _temporary(self, suffix: str) -> Path:
        return self.folder / f".{self._name}{suffix}.tmp"

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            message = (
                f"no space for another shard in {self.folder} ({error.strerror}); free disk space and run "
                f"the same command again to resume after {len(self.finished)} finished shards"
            )
            raise DiskFullError(message) from error


def _create(path: Path) -> IO[bytes]:
    """Create a file, replacing leftovers of an earlier process, including links."""
    path.unlink(missing_ok=True)
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def _finished(
    folder: Path, *, dtype: str, vocab_size: int, log: Callable[[str], None]
) -> list[FinishedShard]:
    """Return the shards that are finished and unchanged; remove later ones and leftovers."""
    found: list[FinishedShard] = []
    for sidecar in sorted(folder.glob("shard_*.json")):
        trouble = None if sidecar.stem == f"shard_{len(found):05d}" else "the previous shard is missing"
        shard = None
        if trouble is None:
            shard, trouble = _checked(sidecar, dtype=dtype, vocab_size=vocab_size)
        if shard is None:
            log(f"{sidecar.with_suffix('.bin')} is written again: {trouble}")
            break
        found.append(shard)
    kept = {f"shard_{number:05d}" for number in range(len(found))}
    for path in folder.iterdir():
        if path.name.lstrip(".").startswith("shard_") and path.name.split(".")[0] not in kept:
            path.unlink()
    return found


def _checked(sidecar: Path, *, dtype: str, vocab_size: int) -> tuple[FinishedShard | None, str]:
    try:
        stated = json.loads(sidecar.read_text(encoding="utf-8"))
        if stated.pop("count") != stated["tokens"] or stated.pop("dtype") != dtype:
            return None, "its sidecar does not match"
        if stated.pop("vocab_size") != vocab_size:
            return None, "its vocabulary differs"
        shard = FinishedShard(**stated)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return None, f"its sidecar cannot be read ({error})"
    for file, sha256 in (
        (sidecar.with_suffix(".bin"), shard.sha256),
        (sidecar.with_suffix(DOCUMENTS_SUFFIX), shard.documents_sha256),
        (sidecar.with_suffix(TARGETS_SUFFIX), shard.targets_sha256),
    ):
        if sha256 is None:
            continue
        if not file.is_file() or sha256_of(file) != sha256:
            return None, f"{file.name} is missing, truncated or modified"
    return shard, ""
