"""What `python -m trainer.tokenize` says of the shards it wrote, and checking that they are still so.

A split's folder holds ``shard_00000.bin`` and so on (ids, raw little-endian uint16 or uint32), beside each
``shard_00000.documents`` (where its documents end: raw little-endian int64, the offset in the shard after a
document's last token) and ``shard_00000.json`` (the sidecar), and for all of them ``manifest.json``, which
also says which tokenizer made them. A document may go on in the next shard.

Sizes are checked whenever shards are opened. Checksums are checked by `verify`: once for shards that have not
changed since (by size and time of modification, kept in ``.verified.json``).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import plain_name
from trainer.storage.files import sha256_of, write_json

MANIFEST = "manifest.json"
JOB = "job.json"
"""What a folder of tokens is made of, beside its splits; written first."""
DOCUMENTS_SUFFIX = ".documents"
FORMAT = 1
TRAIN, VALIDATION = "train", "validation"
_VERIFIED = ".verified.json"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder of shards; None where there is none.

    Raises:
        ValueError: it can't be read; a shard that it lists is missing, of another size, or not listed.

    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    remedy = "write the tokens again, or copy the whole folder again"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed = {shard["file"]: shard for shard in manifest["shards"]}
        width = {"uint16": 2, "uint32": 4}[manifest["dtype"]]
        sizes = {name: (width * shard["tokens"], 8 * shard["documents"]) for name, shard in listed.items()}
        identity = manifest["tokenizer"]["sha256"]
        if not isinstance(identity, str | None):
            raise TypeError(f"the tokenizer's sha256 is {identity!r}")
        for name, shard in listed.items():
            if not plain_name(name):
                raise ValueError(f"{name!r} is not the name of a file in this folder")
            for key in ("tokens", "documents"):
                if type(shard[key]) is not int:
                    raise TypeError(f"{key} of {name} is {shard[key]!r}")
            for key in ("sha256", "documents_sha256"):
                if not isinstance(shard[key], str):
                    raise TypeError(f"{key} of {name} is {shard[key]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no manifest of tokens ({type(error).__name__}: {error}): cut short, altered, or of "
            f"something else, such as a run; {remedy}"
        ) from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}, but this version reads {FORMAT}; {remedy}"
        )
    for name, expected in sizes.items():
        for file, size in zip(
            (folder / name, (folder / name).with_suffix(DOCUMENTS_SUFFIX)), expected, strict=True
        ):
            if not file.is_file():
                raise ValueError(f"{file}, which {path} lists, is missing; {remedy}")
            if file.stat().st_size != size:
                raise ValueError(
                    f"{file} has {file.stat().st_size} bytes where {path} says {size}: cut short or "
                    f"replaced; {remedy}"
                )
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".npy") and p.name not in listed)
    if others:
        raise ValueError(
            f"{folder / others[0]} is not listed in {path}; keep other tokens in a folder of their own"
        )
    result: dict[str, Any] = manifest
    return result


def require_finished(path: Path) -> None:
    """Refuse the output of `python -m trainer.tokenize`, or a split of it, that was stopped before its end.

    Raises:
        ValueError: a split that the job writes has no manifest.

    """
    output = path.parent if path.name in (TRAIN, VALIDATION) else path
    try:
        job = json.loads((output / JOB).read_text(encoding="utf-8"))
        sides = [TRAIN, *([VALIDATION] if job.get("validation_fraction") or VALIDATION in job else [])]
        ours = "tokenizer" in job and "shard_tokens" in job
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # it is no such folder
    sides = [path.name] if path.name in sides and output != path else sides
    missing = [side for side in sides if not (output / side / MANIFEST).is_file()]
    if ours and missing:
        raise ValueError(
            f"tokenizing into {output} was stopped before its end: {output / missing[0]} is not finished; "
            "run the same command of python -m trainer.tokenize again"
        )


def verify(folder: Path, *, again: bool = False) -> int:
    """Check the checksums of a folder's shards; give how many bytes were read.

    What was checked before and has not changed since is not read again; nor is anything by other processes
    of a node than the first (``LOCAL_RANK`` of torchrun above 0).

    Args:
        folder: with a manifest; without one there is nothing to check.
        again: read everything in any case.

    Raises:
        ValueError: a file is not what it was when it was written.

    """
    manifest = read_manifest(folder)
    if manifest is None or (os.environ.get("LOCAL_RANK", "0") != "0" and not again):
        return 0
    expected = {}
    for shard in manifest["shards"]:
        expected[shard["file"]] = shard["sha256"]
        expected[Path(shard["file"]).with_suffix(DOCUMENTS_SUFFIX).name] = shard["documents_sha256"]
    marks = {name: _mark(folder / name, sha256) for name, sha256 in expected.items()}
    known = {} if again else _verified_before(folder)
    unknown = [name for name, mark in marks.items() if known.get(name) != mark]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter
        found = list(pool.map(lambda name: sha256_of(folder / name), unknown))
    for name, sha256 in zip(unknown, found, strict=True):
        if sha256 != expected[name]:
            raise ValueError(
                f"{folder / name} has been altered: its SHA-256 is {sha256[:16]}…, where {folder / MANIFEST} "
                f"says {expected[name][:16]}…; write the tokens again, or copy the file again"
            )
    if unknown:
        with contextlib.suppress(OSError):  # a folder that can't be written to is checked each time
            write_json(folder / _VERIFIED, marks)
    return sum((folder / name).stat().st_size for name in unknown)


def tokenizer_identity(manifest: Mapping[str, Any] | None) -> str | None:
    """Give the SHA-256 that identifies the tokenizer; None where nothing says it."""
    return None if manifest is None else str(manifest["tokenizer"]["sha256"])


def _mark(path: Path, sha256: str) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, sha256]


def _verified_before(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / _VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
