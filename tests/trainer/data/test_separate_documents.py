"""Separate documents in packed rows: batches, losses, states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import implicit_blocks as ib
from trainer.data.source import IGNORED
from trainer.data.tokenizing import Documents, Job, load_tokenizer, tokenize
from trainer.data.tokenizing.documents import find_sources
from trainer.data.tokens import TokenData, positions_in_epochs

END = 256


def folder_of(tmp_path: Path, texts: list[str], *, shard_tokens: int = 1 << 20) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = Documents(sources=find_sources([str(path)]))
    job = Job(
        output=tmp_path / "out",
        documents=documents,
        tokenizer=load_tokenizer("bytes"),
        shard_tokens=shard_tokens,
    )
    tokenize(job, log=lambda text: None)
    return tmp_path / "out"


def in_order(data: TokenData) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """Return inputs, labels and documents of an epoch, in the order of the samples in the files."""
    batch = data.batch(0, data.samples)
    assert batch.documents is not None
    order = positions_in_epochs(0, data.samples, samples=data.samples, seed=0)
    rows = zip(batch.inputs.tolist(), batch.labels.tolist(), batch.documents.tolist(), strict=True)
    return dict(sorted(zip(order, rows, strict=True)))


@pytest.mark.parametrize("shard_tokens", [1 << 20, 7])
def test_rows_have_document_numbers_and_no_labels_across_documents(tmp_path: Path, shard_tokens: int) -> None:
    folder = folder_of(tmp_path, ["abc", "d", "efghijk", "lm"], shard_tokens=shard_tokens)
    data = TokenData(folder, length=5, documents="reset")
    assert (data.tokens, data.files.documents) == (17, 4)
    # a b c . d . e f g h i j k . l m .
    a, d, e, x, y = (ord(letter) for letter in "adejl")
    rows = in_order(data)
    assert rows[0] == ([a, a + 1, a + 2, END, d], [a + 1, a + 2, END, IGNORED, END], [0, 0, 0, 0, 1])
    assert rows[1] == ([END, e, e + 1, e + 2, e + 3], [IGNORED, e + 1, e + 2, e + 3, e + 4], [0, 1, 1, 1, 1])
    assert rows[2] == ([e + 4, x, x + 1, END, y], [x, x + 1, END, IGNORED, y + 1], [0, 0, 0, 0, 1])
    ignored = TokenData(folder, length=5).batch(0, 3)
    assert ignored.documents is None
    assert not (ignored.labels == IGNORED).any()


@pytest.mark.parametrize(
    "mixer",
    [
        {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8},
        {"kind": "attention", "n_heads": 2},
    ],
    ids=["mamba2", "attention"],
)
@pytest.mark.parametrize("kind", ["implicit_lm", "explicit_lm"])
def test_a_document_does_not_depend_on_other_documents_in_its_row(
    tmp_path: Path, mixer: dict[str, Any], kind: str
) -> None:
    texts = ["first one", "and the second", "a third, longer one"]
    folder = folder_of(tmp_path, texts)
    data = TokenData(folder, length=sum(map(len, texts)) + 2, documents="reset")
    batch = data.batch(0, 1)
    spec: dict[str, Any] = {"kind": kind, "vocab_size": 257, "d_model": 16, "n_layers": 2, "mixer": mixer}
    if kind == "implicit_lm":
        spec["at_evaluation"] = {"stopping": {"tolerance": 1e-6, "max_iterations": 200}}
    registry = ib.ImplicitLMSpec if kind == "implicit_lm" else ib.ExplicitLMSpec
    model = ib.build(registry.model_validate(spec)).eval()
    with torch.no_grad():
        for block in model.backbone.blocks() if kind == "implicit_lm" else ():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)  # converges in fewer iterations
            block.mixer.out_proj.parametrizations.weight.original0.mul_(40.0)
        packed = model(batch.inputs, labels=batch.labels, **batch.context())
        total, scored, start = 0.0, 0, 0
        for text in texts:
            ids = torch.tensor([[*text.encode(), END]])
            alone = model(ids[:, :-1], labels=ids[:, 1:])
            # The end token is an input too, unless it is the last token of the row.
            torch.testing.assert_close(
                packed.logits[:, start : start + len(text)], alone.logits, atol=2e-4, rtol=0
            )
            total, scored, start = (
                total + float(alone.loss) * len(text),
                scored + len(text),
                start + len(text) + 1,
            )
        assert float(packed.loss) == pytest.approx(total / scored, abs=1e-4)


def test_files_without_document_ends_are_rejected(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"has no document ends.*set data\.documents=ignore"):
        TokenData(tmp_path / "a.bin", length=5, dtype="uint16", documents="reset")
    (tmp_path / "a.documents").write_bytes(np.array([50, 101], dtype="<i8").tobytes())
    with pytest.raises(ValueError, match=r"a\.documents doesn't match its 100 tokens"):
        TokenData(tmp_path / "a.bin", length=5, dtype="uint16")
