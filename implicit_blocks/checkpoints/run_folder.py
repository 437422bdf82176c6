"""Run folders of the trainer: which run a path belongs to, and which tokenizer its data uses.

This module relies only on what every reader of a run needs: ``spec.yaml``, and under ``checkpoints`` the
folders ``step-…`` with tensors and a record of their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import BYTES, CHECKPOINTS, MANIFEST, SPEC, TOKENIZER
from implicit_blocks.checkpoints.tokenizer_names import is_tokenizer_name
from implicit_blocks.specs import load_spec


def run_of(source: Path) -> Path | None:
    """Return the run folder if ``source`` is one or is a checkpoint of one, else None."""
    for run in (source, source.resolve().parent.parent):
        if (run / SPEC).is_file() and (run / CHECKPOINTS).is_dir():
            return run
    return None


def tokenizer_of(source: Path) -> Path | None:
    """Find the tokenizer of an exported folder, or of the data of a run or checkpoint.

    Returns:
        A ``tokenizer.json``, a folder with one, the name of a repository, or ``bytes`` for the tokenizer
        without a file; None if no tokenizer is known.

    """
    if (source / TOKENIZER).is_file():
        return source
    if (run := run_of(source)) is None:
        return None
    return tokenizer_of_data(getattr(load_spec(run / SPEC), "data", None))


def tokenizer_of_data(data: Any) -> Path | None:
    """Find the tokenizer of a data section, or of the first part of a mixture that has one."""
    found = (_tokenizer_of_data(part) for part in _texts(data))
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def _texts(data: Any) -> Iterator[Any]:
    """Yield the spec of a data source and, for a mixture, of its parts."""
    yield data
    for source in getattr(data, "sources", ()):
        yield from _texts(getattr(source, "data", None))


def _tokenizer_of_data(data: Any) -> Path | None:
    path, named = getattr(data, "path", None), getattr(data, "tokenizer", None)
    if path is not None and (Path(path) / TOKENIZER).is_file():
        return Path(path)
    if named is not None:
        known = named == BYTES or Path(named).exists() or is_tokenizer_name(named)
        return Path(named) if known else None
    folders = [] if path is None else [Path(path), *sorted(Path(path).glob("*/"))]
    return Path(BYTES) if any(_made_of_bytes(folder / MANIFEST) for folder in folders) else None


def _made_of_bytes(manifest: Path) -> bool:
    """Return whether a manifest of token files names the bytes tokenizer."""
    if not manifest.is_file():
        return False
    try:
        return bool(json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]["kind"] == BYTES)
    except (
        ValueError,
        KeyError,
        TypeError,
    ):  # another format, or damaged, which the reader of the data reports
        return False
