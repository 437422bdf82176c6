"""Conversations in `python -m trainer.tokenize --chat`: which tokens are targets, and invalid inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.data.manifest import read_manifest, verify
from trainer.data.token_folder import open_tokens
from trainer.data.tokenizing.chat import ChatTokenizer, load_chat_tokenizer
from trainer.data.tokenizing.command import main
from trainer.data.tokenizing.documents import Documents, find_sources
from trainer.data.tokenizing.fields import Conversations
from trainer.data.tokenizing.tokenizers import load_tokenizer, train_tokenizer

pytest.importorskip("transformers", reason="chat templates are applied by transformers")

TALK: list[dict[str, str]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Who goes there?"},
    {"role": "assistant", "content": "A friend."},
    {"role": "user", "content": "Friend to whom?"},
    {"role": "assistant", "content": "To this ground."},
]
WITHOUT_MARKS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer that has the special tokens of ChatML."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("words")
    special = ["<|im_start|>", "<|im_end|>"]
    content = train_tokenizer([m["content"] for m in TALK] * 3, vocab_size=290, special_tokens=special)
    (folder / "tokenizer.json").write_text(content)
    return folder


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(path: Path, output: Path, *options: str, tokenizer: str = "bytes") -> int:
    common = ["--chat", "--tokenizer", tokenizer, "--workers", "1", "--output", str(output)]
    return main([str(path), *common, *options])


def conversation(tokenizer: ChatTokenizer, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    ids, targets = tokenizer.conversation(Conversations().read(row, "here"), "here")
    return ids.tolist(), targets.tolist()


def marked(tokenizer: ChatTokenizer, row: dict[str, Any]) -> list[str]:
    """Return the texts of the runs of consecutive targets."""
    ids, targets = conversation(tokenizer, row)
    runs: list[list[int]] = []
    for place, token in enumerate(ids):
        if targets[place]:
            runs += [] if place and targets[place - 1] else [[]]
            runs[-1].append(token)
    return [tokenizer.inner.decode(run, skip_special_tokens=False) for run in runs]


def load(source: str | Path, template: str | None) -> ChatTokenizer:
    return load_chat_tokenizer(load_tokenizer(source), source, template=template)


@pytest.mark.parametrize("source", ["bytes", "words"])
def test_exactly_the_answers_are_targets(words: Path, source: str) -> None:
    tokenizer = load("bytes" if source == "bytes" else words, "chatml")
    ids, targets = conversation(tokenizer, {"messages": TALK})
    encoded = tokenizer.inner.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == [*encoded["input_ids"], tokenizer.end_of_document]
    line_break = tokenizer.inner("\n")["input_ids"]
    assert targets[: -1 - len(line_break)] == encoded["assistant_masks"][: -len(line_break)]
    answers = ["A friend.<|im_end|>", "To this ground.<|im_end|>\n<|endoftext|>"]
    assert marked(tokenizer, {"messages": TALK}) == answers


def test_answers_are_found_without_marks_in_the_template(words: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(WITHOUT_MARKS)
    tokenizer = load(words, str(tmp_path / "plain.jinja"))
    assert marked(tokenizer, {"messages": TALK}) == ["A friend.\n", "To this ground.\n<|endoftext|>"]
    assert marked(tokenizer, {"messages": TALK[:4]}) == ["A friend.\n"]
    assert marked(tokenizer, {"messages": TALK[2:3]}) == ["A friend.\n<|endoftext|>"]


def test_a_prompt_has_no_targets(words: Path) -> None:
    tokenizer = load(words, "chatml")
    rows = {"prompt": TALK[:4], "completion": TALK[4:]}
    assert marked(tokenizer, rows) == ["To this ground.<|im_end|>\n<|endoftext|>"]
    plain = load(words, None)
    assert marked(plain, {"prompt": "Who goes", "completion": " there?"}) == [" there?<|endoftext|>"]


def test_no_second_end_token_follows_an_answer_that_ends_with_it(words: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((words / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load(tmp_path, "chatml")
    assert marked(tokenizer, {"messages": TALK})[-1] == "To this ground.<|im_end|>"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_a_folder_holds_targets_and_the_template(words: Path, tmp_path: Path, form: str) -> None:
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}]
    path = write(tmp_path / "talks.jsonl", *rows)
    options = ["--chat-template", "chatml"]
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="parquet is read by pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path := tmp_path / "talks.parquet")
    elif form == "dataset":
        datasets = pytest.importorskip("datasets", reason="datasets are read by the package of that name")
        datasets.Dataset.from_list(rows).save_to_disk(str(path := tmp_path / "talks"))
    assert chat(path, tmp_path / "out", *options, tokenizer=str(words)) == 0
    train = open_tokens(tmp_path / "out", check_sums=True)
    tokenizer = load(tmp_path / "out", None)  # the template is there
    expected = [conversation(tokenizer, row) for row in rows]
    ids = [token for found, _ in expected for token in found]
    targets = [bool(target) for _, found in expected for target in found]
    assert train.read(0, train.tokens, vocab_size=None).tolist() == ids
    assert train.read_targets(0, train.tokens).tolist() == targets
    assert train.document_ends.tolist() == [len(expected[0][0]), len(ids)]
    assert train.tokenizer == load_tokenizer(words).identity["sha256"]
    assert chat(path, tmp_path / "out", *options, tokenizer=str(words)) == 0  # finished already


def test_targets_do_not_depend_on_shards_and_changes_are_noticed(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(200)]
    path = write(tmp_path / "sums.jsonl", *rows)
    folders = []
    for tokens in ("100", "1e6"):
        assert chat(path, tmp_path / tokens, "--shard-tokens", tokens, "--validation-fraction", "0.1") == 0
        folders.append(open_tokens(tmp_path / tokens))
    small, large = folders
    assert len(small.shards) > 5
    assert small.read_targets(0, small.tokens).tolist() == large.read_targets(0, large.tokens).tolist()
    assert small.document_ends.tolist() == large.document_ends.tolist()
    (mask,) = (tmp_path / "1e6" / "train").glob("*.targets")
    mask.write_bytes(bytes(len(mask.read_bytes())))
    with pytest.raises(ValueError, match=r"shard_00000\.targets has been modified"):
        verify(mask.parent)
    mask.write_bytes(b"\1")
    with pytest.raises(ValueError, match=r"shard_00000\.targets has 1 bytes"):
        read_manifest(mask.parent)
    (mask.parent / "manifest.json").unlink()
    (mask.parent.parent / "job.json").unlink()
    with pytest.raises(ValueError, match=r"shard_00000\.targets has 1 bytes but its shard"):
        open_tokens(mask.parent)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"has neither 'messages' nor both 'prompt' and 'completion', only text; rename"),
        ({"messages": []}, r"'messages' in line 2 of .* is list \[\]; expected a list of messages"),
        (
            {"messages": ["hello"]},
            r"message 0 of 'messages' in line 2 .* is str \"hello\"; expected an object",
        ),
        ({"messages": [{"content": "a"}]}, r"message 0 .* has no role, only content; every message needs"),
        (
            {"messages": [{"from": "gpt", "value": "a"}]},
            r"has no role, only from, value; .*\(rename 'from'\)",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, r"the content of message 0 .* is int 3; it must be"),
        ({"messages": TALK[:2]}, r"has no answer, .* \(roles: system, user\); rename the roles"),
        ({"prompt": TALK, "completion": TALK[1:2]}, r"has no answer, .* \(roles: user\)"),
        ({"prompt": "a", "completion": " "}, r"the completion in line 2 .* is empty"),
        ({"prompt": "a", "completion": TALK}, r"are str and list; both must be texts, or both lists"),
    ],
)
def test_rows_without_roles_or_answers_are_rejected(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "talks.jsonl", {"messages": TALK}, row)
    documents = Documents(sources=find_sources([str(path)]), chat=True)
    with pytest.raises(ValueError, match=message) as caught:
        list(documents.pieces())
    assert f"line 2 of {path}" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}\n{% endfor %}",
            r"drops or changes message 0 in line 1 .* \(role 'system', 'Answer briefly.'\)",
        ),
        ("{% for m in messages|reverse %}{{ m['content'] }}{% endfor %}", "drops or changes message 1"),
        ("{% for m in messages %}{{ m['content']|upper }}{% endfor %}", "drops or changes message 0"),
        ("{{ raise_exception('no system message') }}", r"cannot render line 1 .*no system message"),
        ("{% for m in messages %}", "cannot render line 1 .*TemplateSyntaxError"),
        (
            "{% for m in messages %}{{ m['content'] }}{{ loop.last }}{% endfor %}",
            r"messages up to 2 in line 1 .* differently when others follow",
        ),
        (
            "{% for m in messages %}{% if loop.last %}{% generation %}{{ m['content'] }}{% endgeneration %}"
            "{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
            r"marks 1 answers by \{% generation %\} in line 1 .*, which has 2 messages of the assistant",
        ),
    ],
    ids=["drops", "reorders", "changes", "raises", "syntax", "not-prefix", "marks-too-few"],
)
def test_templates_that_lose_messages_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, message: str
) -> None:
    path = write(tmp_path / "talks.jsonl", {"messages": TALK})
    (tmp_path / "given.jinja").write_text(template)
    assert chat(path, tmp_path / "out", "--chat-template", str(tmp_path / "given.jinja")) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert f"line 1 of {path}" in error


def test_options_of_conversations_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "talks.jsonl", {"messages": TALK})
    (tmp_path / "a.txt").write_text("some text")
    for arguments, message in (
        ([str(path)], "the tokenizer has no chat template for the messages in line 1"),
        ([str(path), "--chat-template", "none.jinja"], "there is no chat template none.jinja; give a file"),
        ([str(path), "--text-field", "body"], "--text-field 'body' has no effect"),
        ([str(path), "--chat-template", "chatml", "--validation-fraction", "0.5"], "a single conversation"),
        ([str(tmp_path / "a.txt")], "a.txt is plain text, which has no roles"),
        ([str(path), "--special-tokens", "<a>"], "--special-tokens '<a>' has no effect"),
    ):
        assert chat(Path(arguments[0]), tmp_path / "out", *arguments[1:]) == 2
        assert message in capsys.readouterr().err
    options = ["--workers", "1", "--output", str(tmp_path / "out")]
    assert main([str(path), "--chat", "--train-tokenizer", "300", *options]) == 2
    assert "learns from plain text, not from conversations" in capsys.readouterr().err
    assert main([str(path), "--chat-template", "chatml", "--tokenizer", "bytes", *options]) == 2
    assert "--chat-template 'chatml' has no effect" in capsys.readouterr().err
