"""Benchmark items in the fields of lm-eval's prompts, read from the known file formats.

For each benchmark the format of its release (or of its Hub dataset, as JSON lines) is supported, and the
compact one of ``*_llmfoundry.jsonl``: ``context`` and ``continuation``; ``query``, ``choices`` and ``gold``;
or ``context_options``, ``continuation`` and ``gold``. HellaSwag is also read from text with six lines per
item: the context, the label, four endings.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

Item = dict[str, Any]

_OPENERS: dict[str, Callable[..., Any]] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}


def read_items(kind: str, path: Path) -> list[Item]:
    """Read the items of a benchmark, in the fields of lm-eval's own configuration.

    Args:
        kind: kind of the task, such as ``piqa``.
        path: its file; ``.bz2``, ``.gz`` and ``.xz`` are decompressed.

    Raises:
        ValueError: the file is empty, or an item has an unknown format; names file and line.

    """
    items = []
    try:
        with _open(path) as file:
            for line, row in _rows(kind, path, file):
                try:
                    items.append(_CONVERTERS[kind](row))
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                    raise ValueError(
                        f"{path}, line {line}: unknown format of an item of {kind} ({_describe(error)}); "
                        f"it has {', '.join(map(str, row))}"
                    ) from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read (truncated or damaged): {error}") from None
    if not items:
        raise ValueError(f"{path} contains no items of {kind}")
    return items


def _describe(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _open(path: Path) -> TextIO:
    opened: TextIO = _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8")
    return opened


def _rows(kind: str, path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a file with their first line numbers."""
    if kind == "hellaswag" and ".txt" in path.suffixes:
        yield from _six_lines(path, file)
        return
    labels = _piqa_labels(path) if kind == "piqa" else None
    number = 0
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: not JSON ({error})") from None
        if not isinstance(row, Mapping):
            raise ValueError(f"{path}, line {line}: expected a JSON object, got a {type(row).__name__}")
        if labels is not None and "label" not in row:
            if number >= len(labels):
                raise ValueError(f"{path} has more items than its label file ({len(labels)})")
            row = {**row, "label": labels[number]}
        number += 1
        yield line, row
    if labels is not None and number != len(labels):
        raise ValueError(f"{path} has {number} items, but its label file has {len(labels)}")


def _six_lines(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = file.read().splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) % 6:
        raise ValueError(
            f"{path} has {len(lines)} lines, not a multiple of 6 (context, label, four endings): truncated"
        )
    for first in range(0, len(lines), 6):
        context, label, *endings = lines[first : first + 6]
        yield first + 1, {"context": context, "label": label, "endings": endings}


def _piqa_labels(path: Path) -> list[str] | None:
    """Return the labels that PIQA stores beside its items (``valid-labels.lst``), if the file exists."""
    file = path.with_name(f"{path.name.removesuffix('.jsonl')}-labels.lst")
    return file.read_text(encoding="utf-8").split() if file.is_file() else None


# --------------------------------------------------------------------------------------------- forms


def _lambada(row: Mapping[str, Any]) -> Item:
    if "continuation" in row:
        return {"text": f"{row['context']} {row['continuation']}"}
    return {"text": _text(row["text"])}


def _hellaswag(row: Mapping[str, Any]) -> Item:
    endings = [_text(ending) for ending in row["endings"]]
    item = {"endings": endings, "label": str(_among(row["label"], endings))}
    if "context" in row:
        label, colon, context = row["context"].partition(": ")
        if not colon:
            raise ValueError("the context has no activity label before a colon")
        whole, begun = _begun_sentence(context)
        return {"activity_label": label, "ctx_a": whole, "ctx_b": begun, **item}
    return {name: _text(row[name]) for name in ("activity_label", "ctx_a", "ctx_b")} | item


def _begun_sentence(context: str) -> tuple[str, str]:
    """Split a context into its complete sentences and the incomplete one, which lm-eval capitalizes.

    The six-line format joins them by a space, with the incomplete sentence in lower case.
    """
    if context.rstrip().endswith((".", "!", "?", '"', "'", ")")):
        return context, ""
    ends = [match.end() for match in re.finditer(r"[.!?][\"')]* ", context)]
    at = ends[-1] if ends else 0
    if at == 0 or not context[at : at + 1].islower():
        return context, ""
    return context[: at - 1], context[at:]


def _piqa(row: Mapping[str, Any]) -> Item:
    item = {name: _text(row[name]) for name in ("goal", "sol1", "sol2")}
    return {**item, "label": _among(row["label"], ("sol1", "sol2"))}


def _choices(row: Mapping[str, Any]) -> tuple[str, Item]:
    """Return the question, and the choices with the answer key, as in ARC and OpenBookQA."""
    if "query" in row:
        texts = [_text(choice) for choice in row["choices"]]
        labels = [chr(ord("A") + number) for number in range(len(texts))]
        return _text(row["query"]), _answered(texts, labels, labels[_among(row["gold"], texts)])
    question = row["question_stem"] if "question_stem" in row else row["question"]
    choices = row.get("choices")
    if isinstance(question, Mapping):  # format of the releases
        question, choices = question["stem"], question["choices"]
    if isinstance(choices, Mapping):
        return _text(question), _answered(choices["text"], choices["label"], row["answerKey"])
    assert choices is not None
    texts = [choice["text"] for choice in choices]
    return _text(question), _answered(texts, [choice["label"] for choice in choices], row["answerKey"])


def _answered(texts: list[str], labels: list[str], key: str) -> Item:
    if key.strip() not in labels:
        raise ValueError(f"answer key {key!r} is not one of {', '.join(labels)}")
    return {"choices": {"text": list(texts), "label": list(labels)}, "answerKey": key}


def _arc(row: Mapping[str, Any]) -> Item:
    question, item = _choices(row)
    return {"question": question.removeprefix("Question: "), **item}


def _openbookqa(row: Mapping[str, Any]) -> Item:
    question, item = _choices(row)
    return {"question_stem": question, **item}


def _winogrande(row: Mapping[str, Any]) -> Item:
    if "context_options" not in row:
        item = {name: _text(row[name]) for name in ("sentence", "option1", "option2")}
        if "_" not in item["sentence"]:
            raise ValueError("the sentence has no placeholder _")
        if row["answer"] not in ("1", "2"):
            raise ValueError(f"the answer must be '1' or '2', got {row['answer']!r}")
        return {**item, "answer": row["answer"]}
    first, second = row["context_options"]
    pairs = zip(first.split(" "), second.split(" "), strict=False)
    words = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    shared = "".join(f"{word} " for word, _ in words)
    return {
        "sentence": f"{shared}_ {row['continuation']}",
        "option1": first[len(shared) :],
        "option2": second[len(shared) :],
        "answer": str(_among(row["gold"], (first, second)) + 1),
    }


def _boolq(row: Mapping[str, Any]) -> Item:
    if "query" in row:
        passage, mark, question = row["query"].rpartition("\nQuestion: ")
        if not mark:
            raise ValueError("the query has no line that starts with Question:")
        item = {"passage": passage.removeprefix("Passage: "), "question": question.removesuffix("?")}
        return {**item, "label": _among(row["gold"], ("no", "yes"))}
    passage = f"{row['title']} -- {row['passage']}" if "title" in row else _text(row["passage"])
    label = row["label"] if "label" in row else row["answer"]
    return {
        "passage": passage,
        "question": _text(row["question"]).removesuffix("?"),
        "label": _among(int(label), ("no", "yes")),
    }


_CONVERTERS: dict[str, Callable[[Mapping[str, Any]], Item]] = {
    "lambada": _lambada,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "winogrande": _winogrande,
    "openbookqa": _openbookqa,
    "boolq": _boolq,
}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _among(answer: Any, choices: Any) -> int:
    """Return an answer as the index of a choice."""
    index = int(answer)
    if not 0 <= index < len(choices):
        raise ValueError(f"the answer index is {index}, but there are {len(choices)} choices")
    return index
