"""Tokenizers: identity, end of document, training, and invalid files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.data.tokenizing.command import main
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


def test_the_end_token_comes_from_the_configuration_or_the_usual_names(tmp_path: Path) -> None:
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


def test_the_published_tokenizer_has_its_vocabulary(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "gpt-neox-20b-tokenizer")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (50277, 0)
    assert tokenizer.encode(["Hello world"])[0].tolist() == [12092, 1533]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the repository acme/words in an otherwise empty cache, without a network."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="names are resolved by the package")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--acme--words"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    content = train_tokenizer(TEXTS, vocab_size=280, special_tokens=["<end>"])
    (folder / "tokenizer.json").write_text(content)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_names_are_resolved_from_the_cache_of_the_hub(hub: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("acme/words")
    assert tokenizer.identity == load_tokenizer(hub).identity
    assert tokenizer.end_of_document == 1
    (tmp_path / "a.txt").write_text("the best of times")
    options = ["--tokenizer", "acme/words", "--workers", "1", "--output", str(tmp_path / "out")]
    assert main([str(tmp_path / "a.txt"), *options]) == 0
    for file in hub.iterdir():  # the next programs load the tokenizer, its end and its template from there
        assert (tmp_path / "out" / file.name).read_text() == file.read_text()
    pytest.importorskip("transformers", reason="transformers is not installed")
    from implicit_blocks.hf.tokenizer import load_tokenizer as load_for_transformers

    loaded = load_for_transformers("acme/words")
    assert loaded("the times")["input_ids"] == tokenizer.encode(["the times"])[0].tolist()
    assert (loaded.eos_token, loaded.chat_template) == ("<end>", "{{ messages }}")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["acme/unknown", "no_such_folder"])
def test_unknown_names_are_reported(name: str) -> None:
    with pytest.raises(ValueError, match=rf"there is no tokenizer {name}: no such file .* or 'bytes'"):
        load_tokenizer(name)


def test_tokenizers_without_a_tokenizer_json_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the files are converted by transformers")
    content = json.loads(train_tokenizer(TEXTS, vocab_size=280))
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    converted, original = load_tokenizer(tmp_path), from_content(json.dumps(content))
    found, expected = (
        [ids.tolist() for ids in tokenizer.encode(TEXTS)] for tokenizer in (converted, original)
    )
    assert found == expected
    assert converted.end_of_document == 0
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(
        ValueError, match=r"has no tokenizer\.json and cannot be converted .* none of its files"
    ):
        load_tokenizer(tmp_path)


def test_special_tokens_are_trained_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = from_content(train_tokenizer(TEXTS, vocab_size=290, special_tokens=["<a>", "<b>"]))
    assert [tokenizer._inner.token_to_id(token) for token in ("<|endoftext|>", "<a>", "<b>")] == [0, 1, 2]
    assert {1, 2}.isdisjoint(tokenizer.encode(["<a> <b>"])[0].tolist())
    with pytest.raises(
        ValueError, match=r"vocab_size must be at least 258 \(256 bytes and .*, <a>\), got 257"
    ):
        train_tokenizer(TEXTS, vocab_size=257, special_tokens=["<a>"])
    with pytest.raises(ValueError, match=r"special tokens must differ and not be empty"):
        train_tokenizer(TEXTS, vocab_size=300, special_tokens=["<a>", "<a>"])
