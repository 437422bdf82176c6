"""Output directories of `python -m trainer.tokenize`: found, verified, and rejected after changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.cli.train import main
from trainer.data.manifest import verify
from trainer.data.token_folder import open_tokens
from trainer.data.tokenizing.command import main as tokenize
from trainer.data.tokens import TokenData, build
from trainer.specs.run import EvaluationSpec, TokensSpec

Capture = pytest.CaptureFixture[str]
WANTED = EvaluationSpec(lengths=(8,), sequences=4, last_tokens=1)


def write(folder: Path, *options: str) -> Path:
    """Write two shards and a validation split."""
    source = folder / "texts"
    source.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 40), ("held", 10)):
        rows = [json.dumps({"text": f"{name} {number} " + "word " * 20}) for number in range(count)]
        (source / f"{name}.jsonl").write_text("\n".join(rows))
    arguments = [str(source / "train.jsonl"), "--validation", str(source / "held.jsonl")]
    settings = ["--output", str(folder / "tokens"), "--shard-tokens", "3000", "--workers", "1"]
    assert tokenize([*arguments, *settings, *(options or ("--tokenizer", "bytes"))]) == 0
    return folder / "tokens"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_both_splits_of_a_folder_are_found(tokens: Path) -> None:
    data = build(TokensSpec(path=str(tokens), seq_len=16), vocab_size=257)
    assert data.path == tokens / "train"
    assert len(data.files.shards) == 2
    assert data.files.documents == 40
    source = data.evaluation_sets(WANTED)["L8"].source
    assert isinstance(source, TokenData)
    assert source.path == tokens / "validation"
    assert build(TokensSpec(path=str(tokens / "train"), seq_len=16)).evaluation_sets(WANTED) == {}


def test_evaluation_checks_held_out_tokens_like_training_tokens(tokens: Path) -> None:
    spec = TokensSpec(path=str(tokens), seq_len=16, documents="reset", check_sums=False)
    data = build(spec)
    (batch,) = data.evaluation_sets(WANTED)["L8"].batches(4)
    assert batch.documents is not None
    shard = tokens / "validation" / "shard_00000.bin"
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    data.evaluation_sets(WANTED)
    checked = TokenData(tokens, length=16, check_sums=True)
    with pytest.raises(ValueError, match=r"validation/shard_00000\.bin has been modified"):
        checked.evaluation_sets(WANTED)


def test_epochs_are_counted(tokens: Path) -> None:
    data = TokenData(tokens, length=16)
    assert data.epochs(data.samples * 3 // 2) == {"": pytest.approx(1.5, abs=0.01)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "shard_00001.bin cut",
            r"shard_00001\.bin has \d+ bytes but .*manifest\.json specifies \d+: truncated",
        ),
        ("shard_00000.documents cut", r"shard_00000\.documents has \d+ bytes but"),
        (
            "shard_00001.bin gone",
            r"shard_00001\.bin is listed in .*manifest\.json but missing; tokenize",
        ),
        ("shard_00000.bin altered", r"shard_00000\.bin has been modified: its SHA-256 is \w+…, but"),
        ("shard_00000.documents altered", r"shard_00000\.documents has been modified"),
        (
            "manifest.json cut",
            r"manifest\.json is not a valid token manifest \(JSONDecodeError.*\): truncated",
        ),
        ("shard_00009.bin added", r"shard_00009\.bin is not listed in .*manifest\.json"),
    ],
)
def test_damaged_folders_are_refused(
    tokens: Path, tmp_path: Path, capsys: Capture, damage: str, message: str
) -> None:
    name, how = damage.split()
    path = tokens / "train" / name
    spec = TokensSpec(path=str(tokens), seq_len=16)
    build(spec)  # remembers the checksums
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif how == "gone":
        path.unlink()
    elif how == "added":
        path.write_bytes(b"12")
    else:
        content = bytearray(path.read_bytes())
        content[8] ^= 1
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build(spec)
    # The message appears before training starts, and in a dry run.
    run = ["--spec", "llama_130m", f"data.path={tokens}", "data.seq_len=16", "evaluation.last_tokens=2"]
    for more in (["--dry-run"], ["--device", "cpu", "--output", str(tmp_path / "run")]):
        assert main([*run, *more]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "run").exists()
    assert tokenize(["--verify", str(tokens)]) == 2


def test_checksums_are_verified_once(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tokens / "train"
    assert verify(folder) > 0
    assert verify(folder) == 0
    assert verify(folder, again=True) > 0
    (folder / "shard_00000.bin").touch()
    assert verify(folder) == (folder / "shard_00000.bin").stat().st_size
    monkeypatch.setenv("LOCAL_RANK", "1")
    (folder / "shard_00000.bin").touch()
    assert verify(folder) == 0  # the first process of the node does it
    # Without checksums, altered files of the correct size are not noticed.
    (folder / "shard_00000.bin").write_bytes(bytes((folder / "shard_00000.bin").stat().st_size))
    assert open_tokens(folder).tokens


def test_tokens_of_another_tokenizer_are_rejected(tmp_path: Path, tokens: Path) -> None:
    pytest.importorskip("tokenizers", reason="another tokenizer than bytes")
    other = write(tmp_path / "other", "--train-tokenizer", "270")
    file = str(other / "tokenizer.json")
    build(TokensSpec(path=str(other), seq_len=16, tokenizer=file))
    build(TokensSpec(path=str(tokens), seq_len=16, tokenizer="bytes"))
    with pytest.raises(
        ValueError, match=r"were written with a tokenizer other than .*tokenizer\.json \(SHA-256"
    ):
        build(TokensSpec(path=str(tokens), seq_len=16, tokenizer=file))
    mixed = build(TokensSpec(path=str(tokens), validation_path=str(other), seq_len=16))
    with pytest.raises(ValueError, match="were written with different tokenizers"):
        mixed.evaluation_sets(WANTED)
    np.arange(100, dtype="<u2").tofile(tmp_path / "raw.bin")
    with pytest.raises(ValueError, match=r"has no manifest\.json, so the tokenizer of its tokens is unknown"):
        build(TokensSpec(path=str(tmp_path / "raw.bin"), dtype="uint16", seq_len=16, tokenizer="bytes"))


def test_a_vocabulary_that_is_too_small(tokens: Path, capsys: Capture) -> None:
    with pytest.raises(ValueError, match=r"declares a vocabulary of 257, but the model has vocab_size 256"):
        build(TokensSpec(path=str(tokens), seq_len=16), vocab_size=256)
    assert main(["--spec", "books_10m", f"data.path={tokens}", "model.vocab_size=100", "--dry-run"]) == 2
    assert "set model.vocab_size=257" in capsys.readouterr().err


def test_a_dry_run_describes_the_tokens(tokens: Path, capsys: Capture) -> None:
    run = [
        "--spec",
        "books_10m",
        f"data.path={tokens}",
        "data.seq_len=16",
        "evaluation.lengths=[16]",
        "training.max_tokens=null",
    ]
    settings = ["training.max_steps=10", "training.batch_size=48", "data.documents=reset"]
    assert main([*run, *settings, "--dry-run"]) == 0
    message = capsys.readouterr().out
    found = open_tokens(tokens)
    epochs = 480 / ((found.tokens - 1) // 16)
    assert f"training: {found.tokens:,} tokens, 40 documents in 2 files of" in message
    assert f"the run takes {epochs:.2f} epochs" in message
    assert "10 documents in 1 file of" in message
    assert "documents are separated" in message


@pytest.mark.parametrize("kind", ["tokens", "stream", "mixture"])
def test_a_dry_run_rejects_evaluations_longer_than_the_held_out_text(
    kind: str, tmp_path: Path, tokens: Path, capsys: Capture
) -> None:
    text = f"{{kind: tokens, path: {tokens}, seq_len: 16}}"
    data = {
        "tokens": text,
        "stream": f"{{kind: stream, dataset: none, tokenizer: bytes, validation_path: {tokens}}}",
        "mixture": f"{{kind: mixture, seq_len: 16, sources: [{{weight: 1, data: {text}}}]}}",
    }
    path, held_out = tmp_path / "spec.yaml", tokens / "validation"
    path.write_text(
        "model: {kind: explicit_lm, vocab_size: 257, d_model: 16, n_layers: 1, "
        "mixer: {kind: attention, n_heads: 2}}\n"
        "training: {max_steps: 5, batch_size: 4, optimizer: {kind: adamw, learning_rate: 1.0e-3}}\n"
        f"data: {data[kind]}\n"
    )
    assert main(["--spec", str(path), "--dry-run", "evaluation.lengths=[16]"]) == 0
    capsys.readouterr()
    assert main(["--spec", str(path), "--dry-run", "evaluation.lengths=[16, 9000]"]) == 2
    message = capsys.readouterr().err
    found = f"{held_out} has {open_tokens(held_out).tokens} tokens, too few for one sample of length 9000"
    assert found in message
    assert "reduce the length" in message


def test_a_run_is_not_resumed_on_other_tokens(tmp_path: Path, tokens: Path, capsys: Capture) -> None:
    settings = ["model.d_model=16", "model.n_layers=1", "model.mixer.n_heads=2", "model.mlp.d_ff=16"]
    settings += ["model.vocab_size=257", "data.seq_len=16", "training.max_steps=5", "training.batch_size=4"]
    settings += ["training.threads=1", "training.precision=float32", "evaluation.lengths=[16]"]
    run = ["--spec", "books_10m_explicit", f"data.path={tokens}", *settings, "--device", "cpu"]
    output = ["--output", str(tmp_path / "run")]
    assert main([*run, *output, "--stop-at", "2"]) == 0
    moved = tokens.rename(tmp_path / "moved")
    source = tmp_path / "texts" / "train.jsonl"
    source.write_text(source.read_text().replace("word", "text"))
    held_out = ["--validation", str(tmp_path / "texts" / "held.jsonl"), "--tokenizer", "bytes"]
    assert tokenize([str(source), *held_out, "--output", str(tokens), "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["--resume", *output, "--device", "cpu"]) == 2
    assert "differ from those it was trained on (content: " in capsys.readouterr().err
    # Moved tokens are the same data; other tokens are accepted if the command names them.
    assert main(["--resume", *output, f"data.path={moved}", "--stop-at", "3", "--device", "cpu"]) == 0
    assert main(["--resume", *output, f"data.path={tokens}", "--stop-at", "4", "--device", "cpu"]) == 0
    assert main(["--resume", *output, "--device", "cpu"]) == 0  # these are its own now
