"""``python -m implicit_blocks generate``: prompts as text or numbers, by a trained run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from trainer.run import build
from trainer.spec import RunSpec
from trainer.tokenize import main as tokenize

Small = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def run(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("numbers") / "run"
    build(small({"training.max_steps": 1}), output=folder, device="cpu").train()
    return folder


@pytest.fixture(scope="module")
def book(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on text, beside whose tokens stands their tokenizer."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    place = tmp_path_factory.mktemp("words")
    for name, times in (("train.txt", 60), ("held-out.txt", 20)):
        (place / name).write_text("the cat sat on the mat, and the dog sat by the cat. " * times)
    texts = [str(place / "train.txt"), "--validation", str(place / "held-out.txt"), "--workers", "1"]
    assert tokenize([*texts, "--train-tokenizer", "280", "--output", str(place / "tokens")]) == 0
    data = {"kind": "tokens", "path": str(place / "tokens"), "length": 12}
    evaluation = {"lengths": [12], "sequences": 2, "batch_size": 2}
    changes = {"model.vocab_size": 280, "training.max_steps": 1, "data": data, "evaluation": evaluation}
    build(small(changes), output=place / "run", device="cpu").train()
    return place / "run"


def test_numbers_are_continued_as_generate_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "0 3 2", "5", "--max-new-tokens", "3"]) == 0
    out, said = capsys.readouterr()
    made = ib.generate(ib.load_model(run), [[0, 3, 2], [5]], max_new_tokens=3).tokens.tolist()
    assert out.splitlines() == [" ".join(map(str, ids)) for ids in ([0, 3, 2, *made[0]], [5, *made[1]])]
    assert said.startswith("6 tokens, ")
    assert "iterations each" in said


def test_options_reach_the_sampling(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--temperature", "5", "--seed", "3", "--top-k", "6", "--top-p", "1", "--tolerance", "0.5"]
    assert main(["generate", str(run), "5", "--max-new-tokens", "9", *drawn]) == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    options = {"temperature": 5.0, "seed": 3, "top_k": 6, "top_p": 1.0, "tolerance": 0.5}
    made = ib.generate(ib.load_model(run), [[5]], max_new_tokens=9, **options)
    assert ids == [5, *made.tokens[0].tolist()]


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000001"], ids=["run", "checkpoint"])
def test_text_by_the_tokenizer_beside_the_data(
    book: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert main(["generate", str(book / place), "the cat", "the dog", "--max-new-tokens", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("the cat")
    assert second.startswith("the dog")


def test_text_where_there_is_no_tokenizer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "the cat"]) == 2
    assert "'the cat' is no row of token ids, and there is no tokenizer" in capsys.readouterr().err
    assert main(["generate", str(run), "5", "--tokenizer", str(tmp_path)]) == 2
    assert "there is no tokenizer at" in capsys.readouterr().err


def test_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "none"), "5"]) == 2
    assert "there is nothing at" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "message"), [("foo", "'foo' is not a device's name"), ("mps:9", "mps")])
def test_a_device_that_isn_t_there(
    run: Path, device: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "5", "--device", device]) == 2
    assert message in capsys.readouterr().err


def test_what_a_damaged_run_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    next((damaged / "checkpoints").glob("*/*.distcp")).unlink()
    assert main(["generate", str(damaged), "5"]) == 2
    assert "has no checkpoint that is whole" in capsys.readouterr().err
