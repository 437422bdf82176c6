"""The program that writes the texts of a comparison: which books are in which text, always alike."""

import runpy
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "equal_compute_text.py"
SEPARATOR = "<|endoftext|>"


def book(number: int) -> str:
    return "".join(f"book {number}, line {line}\n" for line in range(100)).strip()


def test_training_books_are_cut_at_a_line_and_the_last_books_are_for_the_tokenizer(tmp_path: Path) -> None:
    books = [book(number) for number in range(5)]
    source = tmp_path / "books.txt"
    source.write_text(SEPARATOR.join([*books[:3], "too short", *books[3:]]), encoding="utf-8")
    program = runpy.run_path(str(PROGRAM))
    program["main"]([str(source), "--output", str(tmp_path / "texts"), "--books", "2"])
    train, choice, tokenizer = (
        (tmp_path / "texts" / f"{name}.txt").read_text(encoding="utf-8").split(SEPARATOR)
        for name in ("train", "choice", "tokenizer")
    )
    whole = [first + last for first, last in zip(train, choice, strict=True)]
    assert len(whole) == 2
    assert set(whole) < set(books)
    assert all(first.endswith("\n") and len(first) == pytest.approx(0.9 * len(all_of), rel=0.02)
               for first, all_of in zip(train, whole, strict=True))  # fmt: skip
    assert sorted(tokenizer) == sorted(books)  # fewer characters than it may have
    assert tokenizer[::-1][:2] == whole
    again = program["texts"](source.read_text(encoding="utf-8"), count=2, seed=20261129)
    assert again == {"train": train, "choice": choice, "tokenizer": tokenizer}
    other = program["texts"](source.read_text(encoding="utf-8"), count=2, seed=1)
    assert other["tokenizer"] != tokenizer
