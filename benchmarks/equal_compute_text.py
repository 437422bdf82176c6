"""Write the texts of a comparison at equal compute: training books, their last parts, and a tokenizer's text.

    python benchmarks/equal_compute_text.py BOOKS.txt --output texts [--books 20] [--seed 20261129]

BOOKS.txt contains books with ``<|endoftext|>`` between them. The seed shuffles them. The first ``--books``
are the training books: ``train.txt`` has the first nine tenths of each and ``choice.txt`` the rest, by which
recipes are chosen. ``tokenizer.txt`` has the last books in this order, 24 million characters. The defaults
give the other text of docs/equal_compute_tables.md; docs/equal_compute.md has the commands that tokenize
them. The books of the report are a file of their own.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

SEPARATOR = "<|endoftext|>"
SHORTEST = 1000  # characters of a book
TOKENIZED = 24e6  # characters of the tokenizer's text


def texts(books: str, *, count: int, seed: int) -> dict[str, list[str]]:
    """Return the documents of the three texts."""
    documents = [document.strip() for document in books.split(SEPARATOR)]
    documents = [document for document in documents if len(document) > SHORTEST]
    random.Random(seed).shuffle(documents)
    found: dict[str, list[str]] = {"train": [], "choice": [], "tokenizer": []}
    for document in documents[:count]:
        tenth = int(len(document) * 0.9)
        cut = document.rfind("\n", 0, tenth) + 1 or tenth  # at the end of a line
        found["train"].append(document[:cut])
        found["choice"].append(document[cut:])
    total = 0
    for document in reversed(documents):
        found["tokenizer"].append(document)
        total += len(document)
        if total > TOKENIZED:
            break
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("input", type=Path, help="books, with <|endoftext|> between them")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the texts")
    parser.add_argument("--books", type=int, default=20, metavar="N", help="training books (20)")
    parser.add_argument("--seed", type=int, default=20261129, help="order of the books (20261129)")
    options = parser.parse_args(arguments)
    found = texts(options.input.read_text(encoding="utf-8"), count=options.books, seed=options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, documents in found.items():
        path = options.output / f"{name}.txt"
        path.write_text(SEPARATOR.join(documents), encoding="utf-8")
        print(f"{path}: {len(documents)} books, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    main()
