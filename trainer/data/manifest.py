"""The manifest of tokenized shards, written by `python -m trainer.tokenize`, and its verification.

A split's directory contains, for each shard, ``shard_00000.bin`` (raw little-endian uint16 or uint32 IDs),
``shard_00000.documents`` (document ends: raw little-endian int64 offsets in the shard after each document's
last token) and ``shard_00000.json`` (the sidecar); for conversations also ``shard_00000.targets`` (a byte per
token, 1 if it is a target of training). ``manifest.json`` lists all shards and identifies their
tokenizer. A document may continue in the next shard.

Sizes are checked whenever shards are opened. `verify` checks the checksums, once for shards that have not
changed since (by size and modification time, stored in ``.verified.json``).
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
"""Record of the job's settings in the output directory, beside the splits; written first."""
DOCUMENTS_SUFFIX = ".documents"
TARGETS_SUFFIX = ".targets"
FORMAT = 1
TRAIN, VALIDATION = "train", "validation"
_VERIFIED = ".verified.json"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a directory of shards; return None if there is none.

    Raises:
        ValueError: the manifest cannot be read; a listed shard is missing or has another size, or a shard is
            not listed.

    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    remedy = "tokenize again, or copy the whole directory again"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed = {shard["file"]: shard for shard in manifest["shards"]}
        width = {"uint16": 2, "uint32": 4}[manifest["dtype"]]
        sizes = {}
        for name, shard in listed.items():
            sizes[folder / name] = width * shard["tokens"]
            sizes[(folder / name).with_suffix(DOCUMENTS_SUFFIX)] = 8 * shard["documents"]
            if "targets_sha256" in shard:
                sizes[(folder / name).with_suffix(TARGETS_SUFFIX)] = shard["tokens"]
        identity = manifest["tokenizer"]["sha256"]
        if not isinstance(identity, str | None):
            raise TypeError(f"the tokenizer's sha256 is {identity!r}")
        for name, shard in listed.items():
            if not plain_name(name):
                raise ValueError(f"{name!r} is not the name of a file in this directory")
            for key in ("tokens", "documents"):
                if type(shard[key]) is not int:
                    raise TypeError(f"{key} of {name} is {shard[key]!r}")
            for key in ("sha256", "documents_sha256", "targets_sha256"):
                if not isinstance(shard.get(key, "" if key == "targets_sha256" else None), str):
                    raise TypeError(f"{key} of {name} is {shard.get(key)!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a valid token manifest ({type(error).__name__}: {error}): truncated, modified, "
            f"or of another kind of directory, such as a run; {remedy}"
        ) from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}, but this version supports {FORMAT}; {remedy}"
        )
    for file, size in sizes.items():
        if not file.is_file():
            raise ValueError(f"{file} is listed in {path} but missing; {remedy}")
        if file.stat().st_size != size:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes but {path} specifies {size}: truncated or "
                f"replaced; {remedy}"
            )
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".npy") and p.name not in listed)
    if others:
        raise ValueError(
            f"{folder / others[0]} is not listed in {path}; move other tokens to a separate directory"
        )
    result: dict[str, Any] = manifest
    return result


def require_finished(path: Path) -> None:
    """Reject an output directory of `python -m trainer.tokenize`, or a split of it, that is incomplete.

    Raises:
        ValueError: a split that the job writes has no manifest.

    """
    output = path.parent if path.name in (TRAIN, VALIDATION) else path
    try:
        job = json.loads((output / JOB).read_text(encoding="utf-8"))
        sides = [TRAIN, *([VALIDATION] if job.get("validation_fraction") or VALIDATION in job else [])]
        ours = "tokenizer" in job and "shard_tokens" in job
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # not an output directory
    sides = [path.name] if path.name in sides and output != path else sides
    missing = [side for side in sides if not (output / side / MANIFEST).is_file()]
    if ours and missing:
        raise ValueError(
            f"tokenization into {output} is incomplete: {output / missing[0]} is not finished; "
            "run the same python -m trainer.tokenize command again"
        )


def verify(folder: Path, *, again: bool = False) -> int:
    """Verify the checksums of the shards in a directory; return the number of bytes read.

    Files that have been verified and have not changed since are skipped. On each node only the first process
    verifies (those with torchrun's ``LOCAL_RANK`` above 0 skip it).

    Args:
        folder: directory with a manifest; without one nothing is verified.
        again: verify all files, even if verified before.

    Raises:
        ValueError: the content of a file has changed.

    """
    manifest = read_manifest(folder)
    if manifest is None or (os.environ.get("LOCAL_RANK", "0") != "0" and not again):
        return 0
    expected = {}
    for shard in manifest["shards"]:
        expected[shard["file"]] = shard["sha256"]
        expected[Path(shard["file"]).with_suffix(DOCUMENTS_SUFFIX).name] = shard["documents_sha256"]
        if "targets_sha256" in shard:
            expected[Path(shard["file"]).with_suffix(TARGETS_SUFFIX).name] = shard["targets_sha256"]
    marks = {name: _mark(folder / name, sha256) for name, sha256 in expected.items()}
    known = {} if again else _verified_before(folder)
    unknown = [name for name, mark in marks.items() if known.get(name) != mark]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter
        found = list(pool.map(lambda name: sha256_of(folder / name), unknown))
    for name, sha256 in zip(unknown, found, strict=True):
        if sha256 != expected[name]:
            raise ValueError(
                f"{folder / name} has been modified: its SHA-256 is {sha256[:16]}…, but {folder / MANIFEST} "
                f"specifies {expected[name][:16]}…; tokenize again, or copy the file again"
            )
    if unknown:
        with contextlib.suppress(OSError):  # a read-only directory is verified each time
            write_json(folder / _VERIFIED, marks)
    return sum((folder / name).stat().st_size for name in unknown)


def tokenizer_identity(manifest: Mapping[str, Any] | None) -> str | None:
    """Return the SHA-256 that identifies the tokenizer, or None without a manifest."""
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
