"""A data directory with a few items per benchmark, and small models with a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import implicit_blocks as ib
from trainer.data.tokens import write_tokens

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

LAMBADA = [
    {"context": "He took the rope. The rope was wet, so he dried the", "continuation": "rope"},
    {"context": '"Sit," she said to the dog,\n\nand down sat the', "continuation": "dog"},
    {"context": "There was no wind. They rowed", "continuation": "on"},
]
HELLASWAG = [
    ("Clean and jerk: A lady walks to a barbell. She grabs the pole. the lady", 3),
    ("Cars: How to wash a car. Rinse it. Start at the roof.", 1),
    ("Tango: . a man in tuxedo", 0),
    ("Sports: the players stand in a row", 2),
]
PIQA = [
    {"goal": "Dry a brush.", "sol1": "Hang it up.", "sol2": "Boil it in oil."},
    {"goal": "ice box", "sol1": "turn into a cooler ", "sol2": "turn into a oven"},
    {"goal": "How do I boil an egg?", "sol1": "Use a pot of paper", "sol2": "Use a pot of water"},
]
QUESTIONS = [
    ("Which one gives light of its own?", ["the moon", "the sun", "a mirror", "a wall"], 1),
    ("Predators eat", ["lions", "humans", "bunnies", "grass"], 2),
    ("Ice is", ["water", "wood", "air", "sand"], 0),
]
WINOGRANDE = [
    (["Ann was better than Eve so Ann", "Ann was better than Eve so Eve"], "got the job.", 0),
    (["The wine would ruin the bed, but the blanket", "The wine would ruin the bed, but the bed"], ".", 1),
    (["He met Bob at Al", "He met Bob at Bob"], "'s house.", 0),
]
BOOLQ = [
    ("Ethanol -- It takes energy.\nMuch of it.", "does ethanol take energy", 1),
    ("Cats -- They purr.", "do cats bark", 0),
]


def _lines(path: Path, rows: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture
def write_lines() -> Callable[[Path, Iterable[Any]], None]:
    return _lines


@pytest.fixture
def endings() -> list[str]:
    return ["lifts it.", "rinses  the roof.", "walks off.", "says [title] hello."]


@pytest.fixture
def benchmarks(tmp_path: Path, endings: list[str]) -> Path:
    """Write the compact forms of all benchmarks; return the folder of data."""
    data = tmp_path / "data"
    _lines(data / "lambada" / "lambada_openai_llmfoundry.jsonl", LAMBADA)
    text = "".join("\n".join([context, str(label), *endings]) + "\n" for context, label in HELLASWAG)
    (data / "hellaswag").mkdir()
    (data / "hellaswag" / "hellaswag_val_full.txt").write_text(text, encoding="utf-8")
    _lines(data / "piqa" / "valid.jsonl", PIQA)
    (data / "piqa" / "valid-labels.lst").write_text("0\n0\n1\n")
    for name, prefix in (("arc/arc_easy_test", "Question: "), ("arc/arc_challenge_test", "Question: ")):
        rows = [{"query": prefix + q, "choices": c, "gold": g} for q, c, g in QUESTIONS]
        _lines(data / f"{name}_llmfoundry.jsonl", rows)
    rows = [{"query": q, "choices": c, "gold": g} for q, c, g in QUESTIONS]
    _lines(data / "openbookqa" / "openbookqa_test_llmfoundry.jsonl", rows)
    rows = [{"context_options": o, "continuation": c, "gold": g} for o, c, g in WINOGRANDE]
    _lines(data / "winogrande" / "winogrande_dev_llmfoundry.jsonl", rows)
    rows = [
        {"query": f"Passage: {p}\nQuestion: {q}?", "choices": ["no", "yes"], "gold": g} for p, q, g in BOOLQ
    ]
    _lines(data / "boolq" / "boolq_llmfoundry.jsonl", rows)
    return data


@pytest.fixture
def as_released(endings: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the same items with the fields of the data sets on the Hub, which lm-eval downloads."""
    letters = ["A", "B", "C", "D"]

    def science(stem: str) -> list[dict[str, Any]]:
        return [
            {stem: q, "choices": {"text": c, "label": letters}, "answerKey": letters[g]}
            for q, c, g in QUESTIONS
        ]

    def gap(options: list[str], continuation: str, gold: int, at: int) -> dict[str, Any]:
        first, second = (option[at:] for option in options)
        sentence = f"{options[0][:at]}_ {continuation}"
        return {"sentence": sentence, "option1": first, "option2": second, "answer": str(gold + 1)}

    contexts = [
        ("Clean and jerk", "A lady walks to a barbell. She grabs the pole.", "the lady"),
        ("Cars", "How to wash a car. Rinse it. Start at the roof.", ""),
        ("Tango", ".", "a man in tuxedo"),
        ("Sports", "the players stand in a row", ""),
    ]
    return {
        "lambada": [{"text": f"{row['context']} {row['continuation']}"} for row in LAMBADA],
        "hellaswag": [
            {"activity_label": a, "ctx_a": whole, "ctx_b": begun, "endings": endings, "label": str(label)}
            for (a, whole, begun), (_, label) in zip(contexts, HELLASWAG, strict=True)
        ],
        "piqa": [{**row, "label": label} for row, label in zip(PIQA, (0, 0, 1), strict=True)],
        "arc_easy": science("question"),
        "arc_challenge": science("question"),
        "openbookqa": science("question_stem"),
        "winogrande": [
            gap(*WINOGRANDE[0], at=26), gap(*WINOGRANDE[1], at=37), gap(*WINOGRANDE[2], at=14),
        ],
        "boolq": [{"passage": p, "question": q, "label": g} for p, q, g in BOOLQ],
    }  # fmt: skip


PARTS: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {
        "mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2),
        "mlp": ib.SwiGLUSpec(d_ff=24),
    },
}


@pytest.fixture(params=list(PARTS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _model(family: str = "attention", **changes: Any) -> Any:
    """Build a small model with 300 tokens whose search converges after several iterations."""
    torch.manual_seed(0)
    tight = ib.AtEvaluation(stopping=ib.StoppingOverrides(tolerance=1e-6, max_iterations=200))
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "pad_vocab_to": 16,
        "d_model": 16,
        "n_layers": 1,
        "at_evaluation": tight,
    }
    model = ib.build(ib.ImplicitLMSpec(**(fields | PARTS[family] | changes))).eval()
    with torch.no_grad():
        for block in model.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(40.0)
    return model


@pytest.fixture(scope="session")
def small_model() -> Callable[..., Any]:
    return _model


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Any:
    from implicit_blocks.hf.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer_file)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    import logging

    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _quiet_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")  # the command sets it too; this restores it


@pytest.fixture(scope="session")
def exported_once(
    tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., Any], tokenizer_file: Path
) -> Path:
    from implicit_blocks.hf import from_library
    from implicit_blocks.hf.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("exported")
    from_library(small_model(), max_position_embeddings=64).save_pretrained(folder)
    load_tokenizer(tokenizer_file).save_pretrained(folder)
    return folder


@pytest.fixture
def exported(tmp_path: Path, exported_once: Path) -> Path:
    """Return a copy of the folder of a model with its tokenizer."""
    return shutil.copytree(exported_once, tmp_path / "exported")


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory, small: Callable[..., Any]) -> Path:
    from trainer.run.build import build

    folder = tmp_path_factory.mktemp("trained")
    write_tokens(folder / "text.bin", np.arange(2000) % 300, vocab_size=300)
    spec = small(
        {
            "model.vocab_size": 300,
            "data": {"kind": "tokens", "path": str(folder / "text.bin"), "seq_len": 16},
            "training.max_steps": 2,
            "evaluation.lengths": [16],
        }
    )
    build(spec, name="mine", output=folder / "run", device="cpu").train()
    return folder


@pytest.fixture
def run_folder(tmp_path: Path, trained_once: Path) -> Path:
    """Return a copy of a run of two steps with 300 tokens; the tokens are in ``text.bin`` beside it."""
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs the command, which must fail and write nothing, and returns its message."""
    from trainer.evaluation.command import main

    def call(*arguments: Any) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["--device", "cpu", *map(str, arguments)]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().err

    return call
