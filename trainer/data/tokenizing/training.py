"""Training of a tokenizer on the documents of a job, without those that its split holds out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.data.manifest import TRAIN
from trainer.data.tokenizing.documents import Documents
from trainer.data.tokenizing.job import Log, Report, fingerprint_of, locked
from trainer.data.tokenizing.splits import find_split, require_both_sides
from trainer.data.tokenizing.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from trainer.storage.files import write_atomically, write_json

_RECORD = "tokenizer_training.json"


def train_tokenizer_for(
    output: Path,
    documents: Documents,
    *,
    vocab_size: int,
    validation_fraction: float,
    validation_gap: int = 0,
    special_tokens: Sequence[str] = (),
    seed: int,
    log: Log,
    report: Report,
) -> Tokenizer:
    """Train the tokenizer of a job and save it as ``tokenizer.json`` in its output directory.

    An existing tokenizer is reused if ``tokenizer_training.json`` shows that it was trained with the same
    settings.

    Args:
        output: output directory of the job.
        documents: documents of the job; held-out ones are not trained on.
        vocab_size: see `train_tokenizer`.
        validation_fraction: see `trainer.data.tokenizing.Job`.
        validation_gap: see `trainer.data.tokenizing.Job`.
        special_tokens: see `train_tokenizer`.
        seed: see `trainer.data.tokenizing.Job`.
        log: receives messages.
        report: receives the fraction of the inputs read.

    Raises:
        ValueError: the directory contains a tokenizer with other settings or is in use; nothing or everything
            is held out; as `train_tokenizer`.

    """
    file = output / "tokenizer.json"
    record = {
        "vocab_size": vocab_size,
        "validation_fraction": validation_fraction,
        "seed": seed if validation_fraction else None,
        "documents": fingerprint_of(documents),
        **({"validation_gap": validation_gap} if validation_gap else {}),
        **({"special_tokens": list(special_tokens)} if special_tokens else {}),
    }
    if file.is_file():
        _require_same(file, record)
        tokenizer = load_tokenizer(file)
        log(f"reusing {file}: {tokenizer.vocab_size:,} IDs")
        return tokenizer
    split = find_split(documents, fraction=validation_fraction, seed=seed, gap=validation_gap)
    counts = dict.fromkeys(("train", "validation") if validation_fraction else ("train",), 0)

    def texts() -> Iterator[str]:
        for side, piece in split.assign(documents.pieces(lambda share: report(share, 0, 0))):
            counts[side] += piece.begins
            if side == TRAIN:
                yield piece.text

    log(f"training a tokenizer of {vocab_size:,} IDs")
    content = train_tokenizer(texts(), vocab_size=vocab_size, special_tokens=special_tokens)
    require_both_sides(counts)
    output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        if file.is_file():  # written by another process
            _require_same(file, record)
        # Written first: a tokenizer without a matching record is rejected.
        write_json(output / _RECORD, record)
        write_atomically(file, content)
    return load_tokenizer(file)


def _require_same(file: Path, record: dict[str, Any]) -> None:
    try:
        before = json.loads((file.parent / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if before != record:
        changed = sorted(
            key for key in record if not isinstance(before, dict) or before.get(key) != record[key]
        )
        raise ValueError(
            f"{file} was trained with different settings ({', '.join(changed)}); remove the directory, "
            "choose another --output, or use the existing tokenizer by --tokenizer"
        )
