"""``python -m implicit_blocks export`` of runs and checkpoints, including damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from implicit_blocks import load_spec
from implicit_blocks.__main__ import main
from implicit_blocks.checkpoints.run_folder import tokenizer_of
from trainer.checkpoint.load import read_model_tensors
from trainer.data.tokens import write_tokens
from trainer.run.build import build
from trainer.specs.run import RunSpec

pytest.importorskip("transformers", reason="transformers is not installed")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # after the skip

import implicit_blocks.hf  # noqa: F401  # registers the models
from trainer.evaluation.eval_model import find_eval_model

Small = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def run(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("exported") / "run"
    build(small({"training.checkpoint_every": 2}), output=folder, device="cpu").train()
    return folder


def exported(run: Path, destination: Path, checkpoint: Path) -> int:
    return main(["export", str(run / "spec.yaml"), str(destination), "--checkpoint", str(checkpoint)])


@pytest.mark.parametrize(
    ("place", "step"),
    [("", 4), ("checkpoints/step-00000004", 4), ("checkpoints/step-00000002", 2)],
    ids=["run", "newest", "older"],
)
def test_a_run_or_one_of_its_checkpoints_is_exported(
    run: Path, tmp_path: Path, place: str, step: int
) -> None:
    assert exported(run, tmp_path / "out", run / place) == 0
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    tensors = read_model_tensors(run / "checkpoints" / f"step-{step:08d}")
    assert tensors
    for name, tensor in tensors.items():
        assert torch.equal(state[f"model.lm.{name}"], tensor), name


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000002"], ids=["run", "checkpoint"])
def test_a_run_is_exported_without_naming_its_spec(run: Path, tmp_path: Path, place: str) -> None:
    assert main(["export", str(run / place), str(tmp_path / "alone")]) == 0
    assert exported(run, tmp_path / "named", run / place) == 0
    alone, named = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("alone", "named")
    )
    assert all(torch.equal(alone[name], named[name]) for name in named)
    assert load_spec(run) == load_spec(run / "spec.yaml")


def test_the_tokenizer_beside_the_data_is_exported(run: Path, tmp_path: Path) -> None:
    data, own = tmp_path / "data", tmp_path / "run"
    shutil.copytree(run, own)
    (data / "train").mkdir(parents=True)
    write_tokens(data / "train" / "text.bin", np.arange(2000) % 6, vocab_size=6)
    words = Tokenizer(
        WordLevel({word: number for number, word in enumerate([*"abcde", "</s>"])}, unk_token="a")
    )
    words.save(str(data / "tokenizer.json"))
    spec = (own / "spec.yaml").read_text()
    start, end = spec.index("\ndata:"), spec.index("\ntraining:")
    (own / "spec.yaml").write_text(
        f"{spec[:start]}\ndata: {{kind: tokens, path: '{data}', seq_len: 16}}{spec[end:]}"
    )
    assert tokenizer_of(own) == tokenizer_of(own / "checkpoints" / "step-00000004") == data
    assert main(["export", str(own), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("b") == ["b"]
    assert find_eval_model(own).tokenizer == data


def _missing(checkpoint: Path) -> None:
    next(checkpoint.glob("*.distcp")).unlink()


def _cut_short(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:2000])


def _altered(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def _cut_short_unrecorded(checkpoint: Path) -> None:
    _cut_short(checkpoint)
    (checkpoint / "state.json").unlink()


def _record_damaged(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text('{"files": ')


def _no_index(checkpoint: Path) -> None:
    (checkpoint / "tensors.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_missing, "is incomplete: __0_0.distcp is missing; use another checkpoint"),
        (_cut_short, "__0_0.distcp is truncated: expected"),
        (_altered, "__0_0.distcp has changed since it was written"),
        (_cut_short_unrecorded, "cannot be read; a file is missing or truncated"),
        (_record_damaged, "state.json is truncated or not a record of files"),
        (_no_index, "is incomplete: tensors.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_not_exported(
    run: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = Path(shutil.copytree(run / "checkpoints" / "step-00000004", tmp_path / "step-00000004"))
    damage(checkpoint)
    assert exported(run, tmp_path / "out", checkpoint) == 2
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_the_newest_complete_checkpoint_of_a_run_is_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    _cut_short(damaged / "checkpoints" / "step-00000004")
    # The leftover of a killed save: not a checkpoint, although its name sorts last.
    half = Path(shutil.copytree(run / "checkpoints" / "step-00000004", tmp_path / "half"))
    half.rename(damaged / "checkpoints" / "step-00000006.tmp-save")
    assert exported(run, tmp_path / "out", damaged) == 0
    message = capsys.readouterr().err
    assert "__0_0.distcp is truncated: expected" in message
    assert "step-00000002 is exported instead" in message
    tensors = read_model_tensors(run / "checkpoints" / "step-00000002")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(state[f"model.lm.{name}"], tensor) for name, tensor in tensors.items())
    (damaged / "checkpoints" / "step-00000002" / "state.json").unlink()
    assert exported(run, tmp_path / "none", damaged) == 2
    message = capsys.readouterr().err
    assert "no complete checkpoint" in message
    assert "state.json is missing" in message
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/spec.yaml", "{run}"], "exists and is not an empty folder"),
        (["{run}/spec.yaml", "out", "--checkpoint", "{run}/nowhere"], "no weights at"),
        (["{run}/spec.yaml", "out", "--max-shard-size", "5"], "expected a number with KB, MB or GB"),
        (
            ["word_problem_s3", "out", "--checkpoint", "{run}"],
            "embedding.weight has shape (6, 16), expected",
        ),
        (["word_problem_s3_explict", "out"], "did you mean 'word_problem_s3_explicit'?"),
    ],
    ids=["taken", "nowhere", "size", "other-model", "no-spec"],
)
def test_other_export_mistakes_are_reported(
    run: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(word.format(run=run) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_is_exported_as_the_last_phase_leaves_it(small: Small, tmp_path: Path) -> None:
    """The model equals that of ``load_model``; with another tolerance it would be a different function."""
    last = {"name": "tight", "model": {"at_evaluation": {"stopping": {"tolerance": 1e-5}}}}
    spec = small({"phases": [{"name": "loose", "until": 1}, last]})
    place = tmp_path / "spec.yaml"
    place.write_text(json.dumps(spec.model_dump(mode="json")))
    assert main(["export", str(place), str(tmp_path / "out")]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_spec == spec.final_model != spec.model


def test_a_seed_beside_weights_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--seed", "3"]) == 2
    assert "seed 3 needs new weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
