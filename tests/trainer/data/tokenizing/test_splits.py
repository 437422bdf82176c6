"""Train and validation splits of documents, and tokenizers trained without the held-out text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.manifest import TRAIN, VALIDATION, read_manifest
from trainer.data.tokenizing import Documents, Job, load_tokenizer, tokenize, train_tokenizer
from trainer.data.tokenizing.command import main
from trainer.data.tokenizing.documents import find_sources
from trainer.data.tokenizing.pieces import Piece
from trainer.data.tokenizing.splits import AtPosition, ByDocument, find_split

PLAY = "".join(
    f"SPEAKER {number}:\nWhat says the {number}. line?\nIt says nothing.\n\n" for number in range(400)
)


def decoded(folder: Path, tokenizer: Path) -> str:
    """Return the text of a folder's only document."""
    from tokenizers import Tokenizer

    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["documents"] == 1
    ids = np.concatenate([np.fromfile(folder / shard["file"], "<u2") for shard in manifest["shards"]])
    end = load_tokenizer(tokenizer).end_of_document
    assert ids[-1] == end
    assert end not in ids[:-1]
    text: str = Tokenizer.from_file(str(tokenizer)).decode(ids[:-1].tolist(), skip_special_tokens=False)
    return text


def test_a_single_file_is_split_before_the_tokenizer_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="a tokenizer is trained")
    rare = "zyxwvut" * 3  # would be merged if it were seen
    text = PLAY + "".join(f"{rare}\n" for _ in range(300))
    (tmp_path / "input.txt").write_text(text)
    output = tmp_path / "out"
    arguments = [str(tmp_path / "input.txt"), "--validation-fraction", "0.25", "--workers", "1"]
    trained = [*arguments, "--output", str(output), "--train-tokenizer", "400"]
    assert main(trained) == 0
    assert "one document: its end is held out" in capsys.readouterr().err
    tokenizer = output / "tokenizer.json"
    train, validation = (decoded(output / side, tokenizer) for side in (TRAIN, VALIDATION))
    assert train + validation == text
    assert train.endswith("\n\n")
    assert validation.startswith("SPEAKER")
    assert len(validation) / len(text) == pytest.approx(0.25, abs=0.01)
    assert "zy" not in json.loads(tokenizer.read_text())["model"]["vocab"]
    assert tokenizer.read_text() == train_tokenizer([train], vocab_size=400)
    assert main(trained) == 0  # nothing is left to do
    for changed in (["--validation-fraction", "0.1"], ["--train-tokenizer", "300"]):
        assert main([*trained, *changed]) == 2
        assert "was trained with different settings" in capsys.readouterr().err


def test_a_split_document_resumes_after_the_finished_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.tokenizing.pieces.PIECE", 500)
    (tmp_path / "input.txt").write_text(PLAY)
    documents = Documents(sources=find_sources([str(tmp_path / "input.txt")]))

    def split_into(name: str) -> dict[str, bytes]:
        options: dict[str, Any] = {
            "tokenizer": load_tokenizer("bytes"),
            "validation_fraction": 0.3,
            "shard_tokens": 2000,
        }
        tokenize(Job(output=tmp_path / name, documents=documents, **options), log=lambda text: None)
        found = (tmp_path / name).rglob("shard_*.bin")
        return {path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in found}

    whole = split_into("whole")
    assert len(whole) > 6
    assert split_into("again") == whole
    for side in (TRAIN, VALIDATION):  # as where it was stopped
        folder = tmp_path / "again" / side
        (folder / "manifest.json").unlink()
        for path in sorted(folder.glob("shard_*"))[6:]:
            path.unlink()
    assert split_into("again") == whole


def test_documents_that_are_held_out_do_not_train_the_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="a tokenizer is trained")
    texts = [f"{number} " + "the quick brown fox " * (number % 7) for number in range(200)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--validation-fraction", "0.3", "--seed", "5", "--workers", "1"]
    output = tmp_path / "out"
    assert main([str(rows), *options, "--output", str(output), "--train-tokenizer", "300"]) == 0
    kept = [
        piece.text
        for side, piece in ByDocument(0.3, 5).assign(iter(Piece(t, begins=True, ends=True) for t in texts))
        if side == TRAIN
    ]
    assert 100 < len(kept) < 180
    assert (output / "tokenizer.json").read_text() == train_tokenizer(kept, vocab_size=300)
    manifest = read_manifest(output / "validation")
    assert manifest is not None
    assert manifest["documents"] == 200 - len(kept)


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab \n", min_size=2, max_size=80).filter(lambda text: len(text.strip()) > 1),
    fraction=st.floats(0.01, 0.99),
    piece=st.integers(1, 40),
    gap=st.integers(0, 10),
)
def test_a_cut_document_is_whole_and_no_character_is_on_both_sides(
    text: str, fraction: float, piece: int, gap: int
) -> None:
    parts = [text[start : start + piece] for start in range(0, len(text), piece)]
    pieces = [
        Piece(part, begins=not number, ends=number == len(parts) - 1) for number, part in enumerate(parts)
    ]
    held_out = min(len(text) - 1, max(1, round(len(text) * fraction)))
    gap = min(gap, len(text) - held_out - 1)
    found = list(AtPosition(len(text), held_out, gap).assign(iter(pieces)))
    sides = [side for side, _ in found]
    assert sides == sorted(sides)  # training text first
    parts = ["".join(piece.text for of, piece in found if of == side) for side in (TRAIN, VALIDATION)]
    assert text.startswith(parts[0])
    assert text.endswith(parts[1])
    if gap:
        assert 0 <= len(text) - len(parts[0]) - len(parts[1]) <= 2 * gap
    else:
        assert parts[0] + parts[1] == text
    for side in set(sides):
        own = [piece for of, piece in found if of == side]
        assert [piece.begins for piece in own] == [True] + [False] * (len(own) - 1)
        assert [piece.ends for piece in own] == [False] * (len(own) - 1) + [True]


def test_a_text_too_short_to_split_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("two")
    documents = Documents(sources=find_sources([str(tmp_path / "a.txt")]))
    with pytest.raises(
        ValueError, match=r"a single document of 3 characters, too short to hold out a fraction of 0\.1"
    ):
        find_split(documents, fraction=0.1, seed=0)
    (tmp_path / "a.txt").write_text("one two three four")
    split = find_split(documents, fraction=0.3, seed=0)
    assert [piece.text for _, piece in split.assign(documents.pieces())] == ["one two three ", "four"]


def test_a_gap_is_left_out_before_the_held_out_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "input.txt").write_text(PLAY)
    options = ["--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "out")]
    gapped = [str(tmp_path / "input.txt"), "--validation-fraction", "0.25", "--validation-gap", "1000"]
    assert main([*gapped, *options]) == 0
    assert "after a gap of 1,000" in capsys.readouterr().err
    train, validation = (
        bytes(np.fromfile(tmp_path / "out" / side / "shard_00000.bin", "<u2")[:-1].astype("u1")).decode()
        for side in (TRAIN, VALIDATION)
    )
    assert PLAY.startswith(train)
    assert PLAY.endswith(validation)
    assert len(PLAY) - len(train) - len(validation) == pytest.approx(1000, rel=0.1)
    assert train.endswith("\n\n")
    assert validation.startswith("SPEAKER")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--validation-gap", "10"], "a validation gap needs a validation fraction"),
        (
            ["--validation-gap", "-1", "--validation-fraction", "0.1"],
            "validation gap must be at least 0, got -1",
        ),
        (
            ["--validation-gap", "9", "--validation-fraction", "0.6"],
            "a fraction of 0.6 after a gap of 9; give",
        ),
        (
            ["--validation-gap", "3", "--validation-fraction", "0.1", "--separator", " "],
            "the validation gap of 3 characters has no effect",
        ),
    ],
)
def test_gaps_that_cannot_be_left_out_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (tmp_path / "a.txt").write_text("one two three four")
    common = ["--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "out")]
    assert main([str(tmp_path / "a.txt"), *common, *options]) == 2
    assert message in capsys.readouterr().err
