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
from implicit_blocks.specs import load_spec


def run_of(source: Path) -> Path | None:
    """Return the folder of the run that ``source`` is, or is a checkpoint of, if of any."""
    for run in (source, source.resolve().parent.parent):
        if (run / SPEC).is_file() and (run / CHECKPOINTS).is_dir():
            return run
    return None


def tokenizer_of(source: Path) -> Path | None:
    """Find the tokenizer in an exported folder, or of the data of a run or a checkpoint of one.

    Returns:
        A ``tokenizer.json``, a folder with one, or ``bytes`` for the tokenizer that needs no file; None: no
        tokenizer is known.

    """
    if (source / TOKENIZER).is_file():
        return source
    if (run := run_of(source)) is None:
        return None
    found = (_tokenizer_of_data(data) for data in _texts(getattr(load_spec(run / SPEC), "data", None)))
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def _texts(data: Any) -> Iterator[Any]:
    """Yield a data source's spec, or those that a mixture is made of."""
    yield data
    for source in getattr(data, "sources", ()):
        yield from _texts(getattr(source, "data", None))


def _tokenizer_of_data(data: Any) -> Path | None:
    path, named = getattr(data, "path", None), getattr(data, "tokenizer", None)
    if path is not None and (Path(path) / TOKENIZER).is_file():
        return Path(path)
    if named is not None:
        return Path(named) if named == BYTES or Path(named).exists() else None
    folders = [] if path is None else [Path(path), *sorted(Path(path).glob("*/"))]
    return Path(BYTES) if any(_made_of_bytes(folder / MANIFEST) for folder in folders) else None


def _made_of_bytes(manifest: Path) -> bool:
    """Whether a manifest of token files says that their ids are bytes."""
    if not manifest.is_file():
        return False
    try:
        return bool(json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]["kind"] == BYTES)
    except (ValueError, KeyError, TypeError):  # of something else, or damaged, which who reads the data says
        return False
