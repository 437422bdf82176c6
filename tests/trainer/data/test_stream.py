"""Streaming: exact for short distances, approximate with a warning for long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.cli.train import main
from trainer.data import mixture, stream
from trainer.data.stream import ApproximateResumeWarning, StreamData, build
from trainer.data.tokenizing.tokenizers import load_tokenizer, train_tokenizer
from trainer.specs.run import MixtureSpec, StreamSpec

datasets = pytest.importorskip("datasets", reason="streams are read by the package datasets")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is streamed:trainer.data.stream.ApproximateResumeWarning",
    "ignore::DeprecationWarning",  # of the package's own making
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "rows"
    rng = np.random.default_rng(0)
    texts = [f"{number}:" + "x" * int(rng.integers(5, 60)) for number in range(300)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(path))
    return path


def open_stream(folder: Path, **changes: Any) -> StreamData:
    settings = {"dataset": str(folder), "tokenizer": "bytes", "seq_len": 16, "shuffle_buffer": 20, **changes}
    return build(StreamSpec.model_validate({"kind": "stream", **settings}), seed=3, vocab_size=257)


def test_samples_are_cut_from_concatenated_documents(folder: Path) -> None:
    data = open_stream(folder, shuffle_buffer=0, documents="reset")
    batch = data.batch(0, 400)
    row = [*batch.inputs.flatten().tolist(), int(batch.labels[-1, -1])]
    texts = bytes(token if token < 256 else 0 for token in row).split(b"\0")
    assert [int(text.split(b":")[0]) for text in texts[:150]] == list(range(150))
    assert batch.documents is not None
    ends = (batch.inputs == 256)[:, :-1]
    assert torch.equal(ends, batch.documents.diff(dim=1) == 1)
    assert torch.equal(batch.labels == -100, batch.inputs == 256)
    with pytest.raises(StopIteration):
        next(iter(data.evaluation_sets(None)))  # type: ignore[arg-type]  # there is none


def test_a_stream_is_identified_by_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    """The spec only has its path; with another tokenizer there, resuming and mixing are rejected."""
    pytest.importorskip("tokenizers", reason="another tokenizer than bytes")
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["a text"], vocab_size=257))
    own, other = open_stream(folder), open_stream(folder, tokenizer=str(tmp_path / "tokenizer.json"))
    assert own.identity() == open_stream(folder).identity() != other.identity()
    source = {"kind": "stream", "dataset": str(folder), "shuffle_buffer": 20}
    names = ("bytes", str(tmp_path / "tokenizer.json"))
    sources = [{"weight": 1, "data": {**source, "tokenizer": name}} for name in names]
    mixed = MixtureSpec.model_validate({"kind": "mixture", "seq_len": 16, "sources": sources})
    with pytest.raises(ValueError, match="'source0' and 'source1' of the mixture have different tokenizers"):
        mixture.build(mixed, vocab_size=257)


def test_batches_cut_one_stream_and_epochs_follow_on(folder: Path) -> None:
    whole = open_stream(folder).batch(0, 1500).inputs  # about two epochs
    data = open_stream(folder)
    cut = [data.batch(position, 300).inputs for position in range(0, 1500, 300)]
    assert torch.equal(torch.cat(cut), whole)
    # Skipping the shares of other ranks, and restarting for an earlier position, are both exact.
    assert torch.equal(open_stream(folder).batch(700, 9).inputs, whole[700:709])
    assert torch.equal(data.batch(20, 5).inputs, whole[20:25])
    assert not torch.equal(open_stream(folder, shuffle_buffer=0).batch(0, 50).inputs, whole[:50])


def first_document(row: torch.Tensor) -> int:
    """Read the number of the first document that begins in a row."""
    texts = bytes(token if token < 256 else 0 for token in row.tolist()).split(b"\0")
    return int(texts[1].split(b":")[0])


def test_a_large_jump_is_approximate_and_warns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "EXACT", 100)
    exact = open_stream(folder, shuffle_buffer=0, seq_len=128).batch(0, 70).inputs[-1]
    data = open_stream(folder, shuffle_buffer=0, seq_len=128)
    monkeypatch.setattr(stream, "EXACT", 10)
    with pytest.warns(ApproximateResumeWarning, match=r"dataset .* near sample 69, not exactly"):
        found = data.batch(69, 1).inputs[0]
    assert abs(first_document(found) - first_document(exact)) < 25  # of 230 documents gone by
    assert data.batch(70, 3).inputs.shape == (3, 128)


def test_sequential_reading_is_exact_for_any_rank_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_stream(folder).batch(0, 400).inputs
    monkeypatch.setattr(stream, "EXACT", 50)
    data = open_stream(folder)  # the first of two ranks, batches of 200
    assert torch.equal(data.batch(0, 100).inputs, whole[:100])
    assert torch.equal(data.batch(200, 100).inputs, whole[200:300])


def test_building_a_stream_warns_about_approximate_resume(folder: Path) -> None:
    with pytest.warns(ApproximateResumeWarning, match="is streamed: a resumed run continues near"):
        open_stream(folder)


def test_invalid_streams_are_refused(folder: Path, tmp_path: Path) -> None:
    spec = StreamSpec(dataset=str(folder), tokenizer="bytes")
    with pytest.raises(ValueError, match="tokenizer bytes has 257 IDs, but the model has vocab_size 10"):
        build(spec, vocab_size=10)
    with pytest.raises(ValueError, match=r"has no text in field 'body'; it has text; set data\.text_field"):
        open_stream(folder, text_field="body").batch(0, 1)
    datasets.Dataset.from_dict({"text": ["", "  "]}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="contains no text"):
        open_stream(tmp_path / "empty").batch(0, 1)
    with pytest.raises(ValueError, match="cannot be opened"):
        open_stream(tmp_path / "gone")

    def breaks() -> Any:
        yield {"text": "one"}
        raise ConnectionError("gone away")

    broken = datasets.IterableDataset.from_generator(breaks)
    data = StreamData(broken, name="far", text_field="text", tokenizer=load_tokenizer("bytes"), length=16)
    with pytest.raises(
        ValueError, match=r"dataset far cannot be read further \(ConnectionError: gone away\)"
    ):
        data.batch(0, 1)


def test_a_run_on_a_stream_trains_and_resumes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.d_model=16", "model.n_layers=1", "model.mixer.n_heads=2", "model.mlp.d_ff=16"]
    settings += [
        "model.vocab_size=257",
        "training.max_steps=4",
        "training.batch_size=4",
        "training.threads=1",
    ]
    settings += ["training.threads=1", "training.precision=float32", "training.checkpoint_every=2"]
    settings += [f"data={{kind: stream, dataset: {folder}, tokenizer: bytes, seq_len: 16}}"]
    run = ["--spec", "books_10m_explicit", *settings, "--device", "cpu"]
    assert main([*run, "--dry-run"]) == 0
    assert "resuming is approximate" in capsys.readouterr().out
    assert main([*run, "--output", str(tmp_path / "whole")]) == 0
    assert main([*run, "--output", str(tmp_path / "cut"), "--stop-at", "2"]) == 0
    assert main(["--resume", "--output", str(tmp_path / "cut"), "--device", "cpu"]) == 0
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]  # so near the start the way is read exactly
