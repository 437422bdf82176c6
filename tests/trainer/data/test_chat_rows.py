"""Conversations in training: rows, labels on the answers only, evaluation, resuming, mixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.cli.train import main
from trainer.data.chat import ChatData, build
from trainer.data.chat_rows import pack
from trainer.data.mixture import build as build_mixture
from trainer.data.tokenizing.command import main as tokenize
from trainer.evaluation.command import main as evaluate
from trainer.run.build import build as build_run
from trainer.specs.data import ChatSpec, MixtureSpec
from trainer.specs.run import EvaluationSpec, RunSpec

pytest.importorskip("transformers", reason="chat templates are applied by transformers")
Small = Callable[..., RunSpec]


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"{number}+{number}=", "completion": str(2 * number)}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 200 sums, a tenth of them held out."""
    place = tmp_path_factory.mktemp("sums")
    (place / "sums.jsonl").write_text("".join(json.dumps(pair(n)) + "\n" for n in range(200)))
    options = ["--chat", "--tokenizer", "bytes", "--workers", "1", "--validation-fraction", "0.1"]
    assert tokenize([str(place / "sums.jsonl"), *options, "--output", str(place / "tokens")]) == 0
    return place / "tokens"


def conversations(data: ChatData, rows: torch.Tensor | None = None) -> list[tuple[str, str]]:
    """Return the text of each conversation in an epoch, and that of its labels."""
    batch = data.batch(0, data.samples)
    assert batch.documents is not None
    found = []
    for inputs, labels, documents in zip(batch.inputs, batch.labels, batch.documents, strict=True):
        for number in range(int(documents.max()) + 1):
            here = documents == number
            text, scored = inputs[here], labels[here]
            if (scored != -100).any():
                answer = bytes(int(token) for token in scored if 0 <= token < 256).decode()
                assert scored[scored != -100][-1] == 256
                found.append((bytes(text.tolist()).decode(), answer))
    return found


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "one per row"])
def test_every_conversation_occurs_whole_and_only_answers_have_labels(sums: Path, packing: bool) -> None:
    data = ChatData(sums, length=24, packing=packing)
    found = conversations(data)
    assert len(found) == data.rows.conversations == (data.samples if not packing else len(found))
    for text, answer in found:
        number = int(text.split("+")[0])
        assert (text, answer) == (f"{number}+{number}={2 * number}", str(2 * number))
    assert len(set(found)) == len(found)
    if packing:
        assert data.samples < data.rows.conversations / 2
        assert data.rows.filled > 0.85


def test_all_tokens_can_be_scored(sums: Path) -> None:
    batch = ChatData(sums, length=24, packing=False, scoring="all").batch(0, 4)
    for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        end = labels.index(256)
        assert labels[:end] == inputs[1 : end + 1]
        assert set(labels[end + 1 :]) == {-100}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 40))
def test_packed_rows_hold_every_item_once(sizes: list[int], capacity: int) -> None:
    rows = pack(np.array(sizes), capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    used = [sum(sizes[item] for item in row) for row in rows]
    assert max(used) <= capacity
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // capacity) * 1.5 + 1
    assert sum(total <= capacity // 2 for total in used) <= 1  # two such rows would be one


def test_long_conversations_are_truncated_or_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "cdefgh"}, {"prompt": "abcdefgh", "completion": "ij"}, pair(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--chat", "--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "out")]
    assert tokenize([str(tmp_path / "rows.jsonl"), *options]) == 0
    data = ChatData(tmp_path / "out", length=6, packing=False)
    assert (data.rows.conversations, data.rows.truncated, data.rows.dropped) == (3, 2, 1)
    batch = data.batch(0, 2)
    texts = {bytes(row).rstrip(b"\0").decode() for row in batch.inputs.tolist()}
    assert texts == {"abcdef", "3+3=6"}
    lines = ChatSpec(path=str(tmp_path / "out"), seq_len=6).describe(sequences=8, vocab_size=257)
    assert "3 conversations in 2 rows" in lines[0]
    assert "2 longer than a row and truncated, 1 left out" in lines[0]
    with pytest.raises(
        ValueError, match=r"none of the 3 conversations .* within 1 tokens, .*increase data.seq"
    ):
        ChatData(tmp_path / "out", length=1)


def test_tokens_without_answers_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    options = ["--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "out")]
    assert tokenize([str(tmp_path / "a.txt"), *options]) == 0
    with pytest.raises(ValueError, match=r"no record of which tokens are answers; write conversations by"):
        ChatData(tmp_path / "out", length=4)
    with pytest.raises(ValueError, match=r"data\.path is not set; give a directory of conversations"):
        build(ChatSpec())


def test_no_token_sees_another_conversation(sums: Path, small: Small) -> None:
    import implicit_blocks as ib

    model = ib.build(small({"model.vocab_size": 257}).model).eval()
    batch = ChatData(sums, length=24).batch(0, 3)
    assert batch.documents is not None
    other = batch.inputs.clone()
    other[batch.documents == 0] = 7
    options = {"documents": batch.documents, "loops": 3}
    with torch.no_grad():
        first, second = (model(ids, **options).logits for ids in (batch.inputs, other))
    later = batch.documents > 0
    torch.testing.assert_close(first[later], second[later], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first[~later], second[~later], atol=1e-2)


def spec_of(small: Small, sums: Path, **changes: Any) -> RunSpec:
    data = {"kind": "chat", "path": str(sums), "seq_len": 24}
    evaluation = {"lengths": [24], "sequences": 4, "batch_size": 4}
    return small({"model.vocab_size": 257, "data": data, "evaluation": evaluation, **changes})


def test_the_loss_is_that_of_the_answers(small: Small, sums: Path, tmp_path: Path) -> None:
    run = build_run(spec_of(small, sums, **{"training.max_steps": 1}), output=tmp_path / "run", device="cpu")
    batch = ChatData(sums, length=24, seed=run.spec.training.seed).batch(0, 8)
    with torch.no_grad():
        logits = run.model.train()(batch.inputs, labels=batch.labels, documents=batch.documents).logits
    scored = batch.labels != -100
    log_probabilities = logits.float().log_softmax(-1)[scored]
    expected = -log_probabilities.gather(1, batch.labels[scored][:, None]).mean()
    run.train()
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(float(expected), rel=1e-4)
    (result,) = map(json.loads, (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines())
    held_out = ChatData(sums / "validation", length=24, seed=run.spec.evaluation.seed)
    first = held_out.batch(0, min(4, held_out.samples))
    with torch.no_grad():
        again = run.model.eval()(first.inputs, labels=first.labels, documents=first.documents)
    assert result["loss"] == pytest.approx(float(again.loss), rel=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(small: Small, sums: Path, tmp_path: Path) -> None:
    spec = spec_of(small, sums, **{"training.max_steps": 4, "training.batch_size": 4})
    build_run(spec, output=tmp_path / "whole", device="cpu").train()
    build_run(spec, output=tmp_path / "parts", device="cpu").train(stop_at=2)
    build_run(spec, output=tmp_path / "parts", device="cpu", resume=True).train()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_conversations_mix_with_text(sums: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 50)
    options = ["--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "text")]
    assert tokenize([str(tmp_path / "a.txt"), *options]) == 0
    sources = [
        {"weight": 1, "name": "talk", "data": {"kind": "chat", "path": str(sums)}},
        {"weight": 1, "name": "text", "data": {"kind": "tokens", "path": str(tmp_path / "text")}},
    ]
    mixed = build_mixture(MixtureSpec.model_validate({"kind": "mixture", "seq_len": 24, "sources": sources}))
    batch = mixed.batch(0, 40)
    assert batch.documents is not None
    whole = (batch.labels != -100).all(1)
    assert 5 < int(whole.sum()) < 35
    assert torch.equal(batch.documents[whole], torch.zeros_like(batch.documents[whole]))
    assert list(mixed.evaluation_sets(EvaluationSpec(lengths=(24,)))) == ["talk_L24"]


def test_epochs_and_the_dry_run_know_the_number_of_rows(
    small: Small, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ChatSpec(path=str(sums), seq_len=24)
    data = build(spec)
    assert spec.epoch_sequences() == data.samples
    assert data.epochs(2 * data.samples) == {"": 2.0}
    changes = [f"data={{kind: chat, path: {sums}, seq_len: 24}}", "model.vocab_size=257", "phases=[]"]
    assert main(["--spec", "shakespeare", *changes, "training.max_steps=5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{data.rows.conversations} conversations in {data.samples} rows" in out
    assert "the answers have labels" in out


def test_evaluation_by_command_scores_the_answers(
    small: Small, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"training.max_steps": 1, "model.at_evaluation.stopping.max_iterations": 16}
    run = build_run(spec_of(small, sums, **changes), output=tmp_path / "run", device="cpu")
    run.train()
    arguments = ["--checkpoint", str(tmp_path / "run"), "--tokens", str(sums), "--lengths", "24"]
    assert evaluate([*arguments, "--output", str(tmp_path / "scores")]) == 0
    held_out = ChatData(sums / "validation", length=24)
    batch = held_out.batch(0, held_out.samples)
    with torch.no_grad():
        loss = float(run.model.eval()(batch.inputs, labels=batch.labels, documents=batch.documents).loss)
    assert f"{loss:.3f}" in capsys.readouterr().out
