"""``python -m implicit_blocks generate`` from a trained run, with prompts as text or token IDs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.checkpoints.run_folder import tokenizer_of
from trainer.data.tokenizing.command import main as tokenize
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def run(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("numbers") / "run"
    build(small({"training.max_steps": 1}), output=folder, device="cpu").train()
    return folder


@pytest.fixture(scope="module")
def book(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on text whose token folder contains the tokenizer."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    place = tmp_path_factory.mktemp("words")
    for name, times in (("train.txt", 60), ("held-out.txt", 20)):
        (place / name).write_text("the cat sat on the mat, and the dog sat by the cat. " * times)
    texts = [str(place / "train.txt"), "--validation", str(place / "held-out.txt"), "--workers", "1"]
    assert tokenize([*texts, "--train-tokenizer", "280", "--output", str(place / "tokens")]) == 0
    data = {"kind": "tokens", "path": str(place / "tokens"), "seq_len": 12}
    evaluation = {"lengths": [12], "sequences": 2, "batch_size": 2}
    changes = {"model.vocab_size": 280, "training.max_steps": 1, "data": data, "evaluation": evaluation}
    build(small(changes), output=place / "run", device="cpu").train()
    return place / "run"


def test_numbers_are_continued_as_generate_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "0 3 2", "5", "--max-new-tokens", "3"]) == 0
    out, messages = capsys.readouterr()
    made = ib.generate(ib.load_model(run), [[0, 3, 2], [5]], max_new_tokens=3).tokens.tolist()
    assert out.splitlines() == [" ".join(map(str, ids)) for ids in ([0, 3, 2, *made[0]], [5, *made[1]])]
    assert messages.startswith("6 tokens, ")
    assert "iterations each" in messages


def test_options_reach_the_sampler(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--temperature", "5", "--seed", "3", "--top-k", "6", "--top-p", "1", "--tolerance", "0.5"]
    assert main(["generate", str(run), "5", "--max-new-tokens", "9", *drawn]) == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    options = {"temperature": 5.0, "seed": 3, "top_k": 6, "top_p": 1.0, "tolerance": 0.5}
    made = ib.generate(ib.load_model(run), [[5]], max_new_tokens=9, **options)
    assert ids == [5, *made.tokens[0].tolist()]


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000001"], ids=["run", "checkpoint"])
def test_text_is_encoded_by_the_tokenizer_beside_the_data(
    book: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert main(["generate", str(book / place), "the cat", "the dog", "--max-new-tokens", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("the cat")
    assert second.startswith("the dog")


@pytest.fixture(scope="module")
def of_bytes(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on bytes, for which there is no tokenizer file."""
    place = tmp_path_factory.mktemp("bytes")
    (place / "text.txt").write_text("the cat sat on the mat. " * 60)
    command = [str(place / "text.txt"), "--workers", "1", "--tokenizer", "bytes"]
    assert tokenize([*command, "--output", str(place / "tokens")]) == 0
    data = {"kind": "tokens", "path": str(place / "tokens"), "seq_len": 12}
    evaluation = {"lengths": [12], "sequences": 2, "batch_size": 2}
    changes = {"model.vocab_size": 257, "training.max_steps": 1, "data": data, "evaluation": evaluation}
    build(small(changes), output=place / "run", device="cpu").train()
    return place / "run"


def test_a_stop_text_ends_a_continuation(of_bytes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(of_bytes), "the cät", "--max-new-tokens", "8"]
    assert main(command) == 0
    whole = capsys.readouterr().out.removesuffix("\n")
    made = whole.removeprefix("the cät")
    stop = made[2:4]
    assert main([*command, "--stop", stop, "never in the text"]) == 0
    assert capsys.readouterr().out == f"the cät{made[: made.index(stop)]}\n"
    assert main([*command, "--stop", ""]) == 2
    assert "--stop has an empty text" in capsys.readouterr().err


def test_options_of_transformers_reach_the_processors(
    of_bytes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generation = pytest.importorskip("transformers", reason="transformers is not installed").generation
    command = ["generate", str(of_bytes), "the cat", "--max-new-tokens", "6"]
    drawn = ["--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.3", "--seed", "4"]
    assert main([*command, *drawn, "--repetition-penalty", "1.3"]) == 0
    warpers = generation.LogitsProcessorList(
        [
            generation.RepetitionPenaltyLogitsProcessor(1.3),
            generation.TemperatureLogitsWarper(2.0),
            generation.TopKLogitsWarper(50),
            generation.TopPLogitsWarper(0.9),
            generation.MinPLogitsWarper(0.3),
        ]
    )
    options = {"temperature": 1.0, "seed": 4, "logits_processor": warpers, "stop_token_ids": [256]}
    prompt = list(b"the cat")
    made = ib.generate(ib.load_model(of_bytes), [prompt], max_new_tokens=6, **options)
    ids = made.tokens[0, : int(made.lengths[0])].tolist()
    text = bytes([*prompt, *(token for token in ids if token < 256)]).decode(errors="replace")
    assert capsys.readouterr().out == f"{text}\n"
    for wrong, message in (
        (["--min-p", "0.1"], "with a temperature above 0"),
        (["--min-p", "1.1", "--temperature", "1"], "min_p is 1.1"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
    ):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err


WithoutTransformers = Callable[..., subprocess.CompletedProcess[str]]

WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from implicit_blocks.__main__ import main
from implicit_blocks.checkpoints.run_folder import tokenizer_of
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def without_transformers(python: Any) -> WithoutTransformers:
    """Return a function that runs the program with arguments in a process without transformers."""
    return lambda *arguments: python.run(["-c", WITHOUT_TRANSFORMERS, *arguments], cwd=Path.cwd())


def test_a_run_on_bytes_continues_text(of_bytes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(of_bytes), "the cät", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    prompt = list("the cät".encode())
    made = ib.generate(ib.load_model(of_bytes), [prompt], max_new_tokens=3, stop_token_ids=[256])
    ids = made.tokens[0, : int(made.lengths[0])].tolist()
    text = bytes([*prompt, *(token for token in ids if token < 256)]).decode(errors="replace")
    assert out == f"{text}\n"


def test_bytes_need_no_transformers(
    of_bytes: Path, capfd: pytest.CaptureFixture[str], without_transformers: WithoutTransformers
) -> None:
    done = without_transformers("generate", str(of_bytes), "the cat", "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert main(["generate", str(of_bytes), "the cat", "--max-new-tokens", "3"]) == 0
    assert done.stdout == capfd.readouterr().out


@pytest.mark.parametrize("command", ["generate", "export"])
def test_without_transformers_the_commands_say_what_to_install(
    book: Path, command: str, tmp_path: Path, without_transformers: WithoutTransformers
) -> None:
    last = "the cat" if command == "generate" else str(tmp_path / "exported")
    done = without_transformers(command, str(book), last)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "needs transformers 5.17 or newer; " in line
    assert "pip install" in line
    assert not (tmp_path / "exported").exists()


def test_a_run_on_bytes_is_exported_with_its_tokenizer(of_bytes: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert main(["export", str(of_bytes), str(tmp_path / "exported")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.encode("the cät") == list("the cät".encode())
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "exported"), device="cpu")
    texts = [answer[0]["generated_text"] for answer in pipe(["the cat", "a"], batch_size=2, max_new_tokens=2)]
    assert [text[0] for text in texts] == ["t", "a"]


@pytest.mark.parametrize("kind", ["stream", "mixture", "named", "manifest", "alone"])
def test_bytes_are_found_wherever_data_name_them(
    of_bytes: Path, small: Small, kind: str, tmp_path: Path
) -> None:
    tokens = of_bytes.parent / "tokens"
    of_manifest = {"kind": "tokens", "path": str(tokens), "seq_len": 12}
    data = {
        "stream": {"kind": "stream", "dataset": "texts", "tokenizer": "bytes"},
        "mixture": {"kind": "mixture", "sources": [{"weight": 1.0, "data": of_manifest}], "seq_len": 12},
        "named": {**of_manifest, "path": str(tmp_path), "tokenizer": "bytes"},
        "manifest": of_manifest,
        "alone": {**of_manifest, "path": str(tokens / "train")},
    }[kind]
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    spec = small({"data": data, "model.vocab_size": 257, "evaluation": {"lengths": [12]}})
    (run / "spec.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert tokenizer_of(run) == Path("bytes")


def test_text_without_a_tokenizer_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "the cat"]) == 2
    assert "'the cat' is not a list of token IDs, and no tokenizer was found" in capsys.readouterr().err
    assert main(["generate", str(run), "5", "--tokenizer", str(tmp_path)]) == 2
    assert "no tokenizer at" in capsys.readouterr().err


def test_a_path_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "none"), "5"]) == 2
    assert "does not exist; give a run" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "message"), [("foo", "'foo' is not a device's name"), ("mps:9", "mps")])
def test_an_unavailable_device_is_refused(
    run: Path, device: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "5", "--device", device]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_run_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    next((damaged / "checkpoints").glob("*/*.distcp")).unlink()
    assert main(["generate", str(damaged), "5"]) == 2
    assert "has no complete checkpoint" in capsys.readouterr().err
