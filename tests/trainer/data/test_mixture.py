"""Mixtures: exact shares, random access, epochs of small sources, invalid specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from implicit_blocks.specs import SpecError
from trainer.cli.train import main
from trainer.data.apportionment import BLOCK, apportion
from trainer.data.mixture import Mixture, Part, build
from trainer.data.tokenizing.command import main as tokenize
from trainer.data.tokens import TokenData, write_tokens
from trainer.specs.run import MixtureSpec


def parts(
    tmp_path: Path, *, sizes: tuple[int, ...] = (101, 1001), weights: tuple[float, ...] = (1, 3)
) -> list[Part]:
    """Return sources of consecutive token IDs: the first from 0 on, the second from 10,000 on, and so on."""
    made = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        path = tmp_path / f"{number}.bin"
        if not path.exists():
            write_tokens(path, 10_000 * number + np.arange(size), vocab_size=60_000)
        made.append(Part(f"part{number}", TokenData(path, length=10, seed=number), weight))
    return made


def folder_of(path: Path, texts: list[str]) -> Path:
    """Write texts as bytes, with the ends of documents and a manifest."""
    path.mkdir()
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--tokenizer", "bytes", "--workers", "1", "--output", str(path / "tokens")]
    assert tokenize([str(path / "texts.jsonl"), *options]) == 0
    return path / "tokens"


def test_shares_are_exact_and_every_sample_occurs(tmp_path: Path) -> None:
    mixture = Mixture(parts(tmp_path), seed=5)
    batch = mixture.batch(0, 4000)
    source = batch.inputs[:, 0] // 10_000
    assert source.bincount().tolist() == pytest.approx([1000, 3000], abs=100)
    assert mixture._quotas.tolist() == [BLOCK // 4, 3 * BLOCK // 4]
    for number, samples in enumerate((10, 100)):
        own = batch.inputs[source == number, 0] % 10_000
        for epoch in range(5):  # each epoch of a source has each of its samples once
            assert sorted(own[epoch * samples : (epoch + 1) * samples].tolist()) == list(
                range(0, 10 * samples, 10)
            )
    assert len({tuple(source[i : i + 20].tolist()) for i in range(0, 4000, 20)}) > 100  # no fixed pattern


@settings(max_examples=40)
@given(position=st.integers(0, 3 * BLOCK), count=st.integers(1, 50), seed=st.integers(0, 3))
def test_a_position_does_not_depend_on_earlier_positions(
    tmp_path_factory: pytest.TempPathFactory, position: int, count: int, seed: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mixture"
    folder.mkdir(exist_ok=True)
    one, other = (Mixture(parts(folder), seed=seed) for _ in range(2))
    other.batch(7, 3)
    whole = one.batch(position, count)
    rows = [other.batch(position + row, 1) for row in reversed(range(count))][::-1]
    assert torch.equal(whole.inputs, torch.cat([row.inputs for row in rows]))
    assert torch.equal(whole.labels, torch.cat([row.labels for row in rows]))


def test_positions_of_a_source_continue_across_blocks(tmp_path: Path) -> None:
    mixture = Mixture(parts(tmp_path, sizes=(101, 1001, 31), weights=(1.0, 3.3, 0.02)), seed=5)
    seen: list[list[int]] = [[], [], []]
    for position in range(2 * BLOCK + 100):
        source, own = mixture.origin(position)
        seen[source].append(own)
    for own in seen:
        assert own == list(range(len(own)))
    counts = mixture.epochs(2 * BLOCK + 100)
    assert counts == {
        "part0": len(seen[0]) / 10,
        "part1": len(seen[1]) / 100,
        "part2": len(seen[2]) / 3,
    }
    assert mixture.epochs(0) == {"part0": 0.0, "part1": 0.0, "part2": 0.0}


def test_rows_are_apportioned_by_largest_remainders() -> None:
    assert apportion([2.0]) == [BLOCK]
    assert apportion([1, 1, 1]) == [21846, 21845, 21845]
    assert apportion([1, 2, 6]) == [7282, 14563, 43691]  # 7281.8, 14563.6, 43690.7: the largest rests first
    assert sum(apportion([0.1, 0.7, 12.3, 1e-2])) == BLOCK
    with pytest.raises(ValueError, match="weight 1e-09 of a total of 1 is less than one sample in 65536"):
        apportion([1, 1e-9])
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight must be positive and finite"):
            apportion([weight, 1])


def section(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    parts(tmp_path)
    sources = [
        {"weight": 1, "name": "small", "data": {"kind": "tokens", "path": str(tmp_path / "0.bin")}},
        {"weight": 3, "data": {"kind": "tokens", "path": str(tmp_path / "1.bin")}},
    ]
    return {"kind": "mixture", "seq_len": 10, "sources": sources, **changes}


def test_a_spec_builds_sources_with_their_own_seeds(tmp_path: Path) -> None:
    spec = MixtureSpec.model_validate(section(tmp_path))
    assert [source.data.seq_len for source in spec.sources] == [10, 10]
    assert spec.names == ("small", "source1")
    assert MixtureSpec.model_validate(spec.model_dump()) == spec
    mixture = build(spec, seed=3, vocab_size=60_000)
    assert mixture.length == 10
    assert (mixture.vocab_size, mixture.samples, mixture.concurrent) == (60_000, None, True)
    first, second = (part.source for part in mixture.parts)
    assert isinstance(first, TokenData)
    assert isinstance(second, TokenData)
    assert first._seed != second._seed


@pytest.mark.parametrize("weight", [0, -1])
def test_weights_that_are_not_positive_are_refused(
    tmp_path: Path, weight: float, capsys: pytest.CaptureFixture[str]
) -> None:
    value = section(tmp_path)
    value["sources"][0]["weight"] = weight
    with pytest.raises(SpecError, match="weight must be positive"):
        MixtureSpec.model_validate(value)
    file = tmp_path / "run.yaml"
    file.write_text(f"extends: books_10m\ndata: {value!r}\n")
    assert main(["--spec", str(file), "--dry-run"]) == 2
    assert "data.sources" in (message := capsys.readouterr().err)
    assert "weight must be positive" in message


def test_refuses_sources_that_do_not_fit(tmp_path: Path) -> None:
    value = section(tmp_path)
    value["sources"][1]["data"]["seq_len"] = 20
    with pytest.raises(SpecError, match="the seq_len of the mixture is 10"):
        MixtureSpec.model_validate(value)
    value = section(tmp_path)
    value["sources"][1]["name"] = "small"
    with pytest.raises(SpecError, match="source names must be unique"):
        MixtureSpec.model_validate(value)
    with pytest.raises(SpecError, match="sources"):
        MixtureSpec.model_validate(section(tmp_path, sources=[]))
    value = section(tmp_path)
    value["sources"][0]["data"]["path"] = str(tmp_path / "gone")
    with pytest.raises(
        ValueError, match="source 'small' of the mixture: there is no token file or directory"
    ):
        build(MixtureSpec.model_validate(value))


def test_sources_with_different_tokenizers_are_rejected(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path / str(number), ["a text " * 20]) for number in range(2)]
    sources = [{"weight": 1, "data": {"kind": "tokens", "path": str(folder)}} for folder in folders]
    spec = MixtureSpec.model_validate({"kind": "mixture", "seq_len": 10, "sources": sources})
    build(spec)
    manifest = json.loads((folders[1] / "train" / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (folders[1] / "train" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="'source0' and 'source1' of the mixture have different tokenizers"):
        build(spec)


def test_documents_of_the_sources_are_preserved(tmp_path: Path) -> None:
    sources = [
        TokenData(folder_of(tmp_path / str(number), texts), length=10, seed=number, documents="reset")
        for number, texts in enumerate((["ab", "cde", "f"] * 20, ["a longer text", "and", "more"] * 20))
    ]
    mixture = Mixture([Part("short", sources[0], 2), Part("long", sources[1], 1)], seed=1)
    batch = mixture.batch(0, 30)
    assert batch.documents is not None
    for row in range(30):
        number, position = mixture.origin(row)
        alone = sources[number].batch(position, 1)
        assert alone.documents is not None
        assert torch.equal(batch.documents[row], alone.documents[0])
        assert torch.equal(batch.labels[row], alone.labels[0])


def test_words_and_texts_mix(tmp_path: Path) -> None:
    value = section(tmp_path)
    value["sources"][1]["data"] = {"kind": "word_problem", "group": "S3"}
    mixture = build(MixtureSpec.model_validate(value), vocab_size=60_000)
    batch = mixture.batch(0, 100)
    assert batch.inputs.shape == (100, 10)
    assert mixture.epochs(1000).keys() == {"small"}
    wanted: Any = type("W", (), {"lengths": (), "identity_probabilities": (), "sequences": 4, "seed": 1})
    assert list(mixture.evaluation_sets(wanted)) == ["source1_p0.5_L10"]


def test_the_task_is_that_of_all_sources(tmp_path: Path) -> None:
    words = [
        {"weight": 1, "data": {"kind": "word_problem", "group": "A4", "identity_probability": p}}
        for p in (0.9, 0.5)
    ]
    assert MixtureSpec.model_validate(section(tmp_path, sources=words)).task == "products in A4"
    other = {"weight": 1, "data": {"kind": "word_problem", "group": "Z12"}}
    assert MixtureSpec.model_validate(section(tmp_path, sources=[*words, other])).task is None
    assert MixtureSpec.model_validate(section(tmp_path)).task is None


def test_a_run_counts_the_epochs_of_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    settings = (
        "model: {d_model: 16, n_layers: 1, vocab_size: 60000, mixer: {n_heads: 2}, mlp: {d_ff: 16}}\n"
        "training: {max_steps: 3, batch_size: 8, threads: 1, precision: float32}\n"
        "evaluation: {lengths: []}\n"
    )
    file.write_text(f"extends: books_10m_explicit\n{settings}data: {section(tmp_path)!r}\n")
    assert main(["--spec", str(file), "--dry-run"]) == 0
    message = capsys.readouterr().out
    assert "25.00% small: training: 101 tokens in 1 file of" in message
    assert "the run takes 0.60 epochs" in message
    assert main(["--spec", str(file), "--device", "cpu", "--output", str(tmp_path / "run")]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch_small"] + last["epoch_source1"] * 10 == pytest.approx(24 / 10)
