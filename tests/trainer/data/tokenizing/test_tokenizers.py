"""Tokenizers: identity, end of document, training, and invalid files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.data.tokenizing.tokenizers import from_content, load_tokenizer, train_tokenizer

pytest.importorskip("tokenizers", reason="tokenizer.json files are read by the package tokenizers")
TEXTS = ["it was the best of times, it was the worst of times\n" * 20, "ümlaut 🎉 und mehr\n" * 5]


def test_the_bytes_tokenizer_has_no_dependencies() -> None:
    tokenizer = load_tokenizer("bytes")
    assert [ids.tolist() for ids in tokenizer.encode(["aü", ""])] == [[97, 195, 188], []]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_training_gives_a_tokenizer_for_any_text() -> None:
    tokenizer = from_content(train_tokenizer(TEXTS, vocab_size=290))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (290, 0)
    for text in [*TEXTS, "漢字\x00", " "]:
        (ids,) = tokenizer.encode([text])
        assert tokenizer._inner.decode(ids.tolist(), skip_special_tokens=False) == text
    assert len(tokenizer.encode(TEXTS[:1])[0]) < len(TEXTS[0]) / 2
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        train_tokenizer(TEXTS, vocab_size=256)


def test_special_tokens_in_a_text_are_encoded_as_text() -> None:
    tokenizer = from_content(train_tokenizer(TEXTS, vocab_size=300))
    (ids,) = tokenizer.encode(["a<|endoftext|>b"])
    assert tokenizer.end_of_document not in ids
    assert tokenizer._inner.decode(ids.tolist()) == "a<|endoftext|>b"


def test_tokenizer_training_does_not_depend_on_threads(tmp_path: Path) -> None:
    program = "from trainer.data.tokenizing.tokenizers import *; import random; r = random.Random(0)\n"
    program += "texts = [' '.join(str(r.randint(0, 500)) for _ in range(200)) for _ in range(200)]\n"
    program += "print(train_tokenizer(texts, vocab_size=400))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "RAYON_NUM_THREADS": threads}, check=True,
            capture_output=True,
        ).stdout
        for threads in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    content = train_tokenizer(TEXTS, vocab_size=280)
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "compact.json").write_text(json.dumps(json.loads(content)))
    first = load_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).identity == first.identity
    assert load_tokenizer(tmp_path / "compact.json").identity == first.identity
    assert load_tokenizer(tmp_path, end_of_document="a").identity != first.identity
    assert from_content(train_tokenizer(TEXTS, vocab_size=281)).identity != first.identity


def test_the_end_of_a_document(tmp_path: Path) -> None:
    content = train_tokenizer(TEXTS, vocab_size=280)
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    assert load_tokenizer(tmp_path).end_of_document == json.loads(content)["model"]["vocab"]["b"]
    with pytest.raises(ValueError, match="it has no token '<none>'; set the end-of-document token"):
        load_tokenizer(tmp_path, end_of_document="<none>")
    without = json.loads(content)
    without["added_tokens"] = []
    without["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "without.json").write_text(json.dumps(without))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"without\.json: it has no known end token"):
        load_tokenizer(tmp_path / "without.json")


@pytest.mark.parametrize("config", ["{", "[" * 100_000, '{"eos_token": 3}'])
def test_a_tokenizer_config_that_is_damaged_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, vocab_size=280))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json .*; set --end-of-document"):
        load_tokenizer(tmp_path)


def test_a_file_that_is_not_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no tokenizer .*tokenizer\.json; give a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"it cannot be read as a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="the bytes tokenizer has no token '<eos>'"):
        load_tokenizer("bytes", end_of_document="<eos>")


def test_the_published_vocabulary(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "gpt-neox-20b-tokenizer")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (50277, 0)
    assert tokenizer.encode(["Hello world"])[0].tolist() == [12092, 1533]
