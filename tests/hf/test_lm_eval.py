"""The lm-eval command on exported folders, offline: log-likelihoods and generation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from implicit_blocks.__main__ import main
from implicit_blocks.hf.tokenizer import load_tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

ITEMS = [
    {"q": "The sun and the", "choices": ["wind", "other side of the moon", "x"], "gold": 0},
    {"q": "She put the lid on the", "choices": ["pot", "water that was there", "brush"], "gold": 1},
    {"q": "To clean the brush, rinse it with", "choices": ["water", "it", "the light"], "gold": 2},
    {"q": "I", "choices": ["am", "was over there again", "o"], "gold": 0},
    {"q": "Which of these is the source of the light that the other ones", "choices": ["a", "b"], "gold": 1},
]
MIXERS = {
    "mamba2": {"mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 4}},
    "attention": {
        "mixer": {"kind": "attention", "n_heads": 4, "n_kv_heads": 2},
        "mlp": {"kind": "swiglu", "d_ff": 24},
    },
}


@pytest.fixture
def exported(tmp_path: Path, tokenizer_file: Path) -> Callable[..., Path]:
    """Return a function that exports a small model of a family with its tokenizer."""

    def make(family: str, *, vocab_size: int = 300, name: str = "exported") -> Path:
        spec = {
            "model": {
                "kind": "implicit_lm",
                "vocab_size": vocab_size,
                "d_model": 16,
                "n_layers": 1,
                "stopping": {"tolerance": 1e-4, "max_iterations": 24},
                "at_evaluation": {"stopping": {"max_iterations": 24}},
                **MIXERS[family],
            },
            "data": {"kind": "tokens", "seq_len": 64},
            "training": {
                "max_steps": 1,
                "batch_size": 1,
                "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
                "schedule": {"kind": "warmup_linear"},
            },
        }
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
        folder = tmp_path / name
        command = ["export", str(tmp_path / "spec.yaml"), str(folder), "--tokenizer", str(tokenizer_file)]
        assert main(command) == 0
        return folder

    return make


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Write two tasks of lm-eval on the same local items; return their folder."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice = {
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
    }
    generate = {
        "task": "tiny_generate",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    for task in (choice, generate):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


EACH = """
import json, runpy, sys
from lm_eval.tasks import TaskManager
create = TaskManager.__init__
TaskManager.__init__ = lambda self, *a, **named: create(self, *a, **{**named, "include_defaults": False})
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lm_eval", *arguments]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
"""
"""Runs ``python -m lm_eval ARGUMENTS`` several times in one process, without lm-eval's thousands of tasks.

Importing, and reading those tasks, take most of the time.
"""


def lm_eval(python: Any, folders: dict[str, Path], tasks: Path, home: Path) -> None:
    """Run the command in a separate process without network; outputs are written beside ``home``."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    no_network = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    commands = [
        [
            "run", "--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True",
            "--device", "cpu", "--include_path", str(tasks), "--tasks", "tiny_choice,tiny_generate",
            "--batch_size", "3", "--output_path", str(home.parent / f"of_{name}"), "--log_samples",
        ]
        for name, folder in folders.items()
    ]  # fmt: skip
    done = python.run(
        ["-c", EACH, json.dumps(commands)],
        cwd=home.parent,
        environment={**os.environ, **offline, **no_network},
        timeout=300.0,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def logged_in(output: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the logged samples of each task."""
    logged = {}
    for name in ("tiny_choice", "tiny_generate"):
        (file,) = output.rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        logged[name] = sorted(rows, key=lambda row: row["doc_id"])
    return logged


def test_lm_eval_runs_on_exported_folders(exported, tasks, tmp_path, python):
    folders = {family: exported(family, name=family) for family in MIXERS}
    lm_eval(python, folders, tasks, tmp_path / "home")
    for family, folder in folders.items():
        assert_right(folder, logged_in(tmp_path / f"of_{family}"))


def assert_right(folder: Path, logged: dict[str, list[dict[str, Any]]]) -> None:
    from transformers import AutoModelForCausalLM

    from implicit_blocks.hf.folders import read_pretrained, to_library

    assert [len(rows) for rows in logged.values()] == [5, 5]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    assert read_pretrained(folder).fields["eos_token_id"] == 0
    library = to_library(model)
    with torch.no_grad():
        for item, row in zip(ITEMS, logged["tiny_choice"], strict=True):
            assert len(row["filtered_resps"]) == len(item["choices"])
            for choice, (value, _) in zip(item["choices"], row["filtered_resps"], strict=True):
                question = tokenizer.encode(item["q"])
                answer = tokenizer.encode(f"{item['q']} {choice}")[len(question) :]
                tokens = torch.tensor([[*question, *answer]])
                scores = library(tokens[:, :-1]).logits.log_softmax(-1)[0, -len(answer) :]
                expected = scores.gather(1, torch.tensor(answer)[:, None]).sum()
                assert float(value) == pytest.approx(float(expected), abs=1e-4)
        for item, row in zip(ITEMS, logged["tiny_generate"], strict=True):
            question = torch.tensor([tokenizer.encode(item["q"])])
            alone = model.generate(question, max_new_tokens=5, do_sample=False, pad_token_id=0)
            text = tokenizer.decode(alone[0, question.shape[1] :], skip_special_tokens=True)
            assert row["filtered_resps"] == [text.partition("\n")[0]]


def test_log_likelihoods_of_lm_eval_do_not_depend_on_the_batch(family, exported, tasks):
    """Equal to 1e-4, although lm-eval pads on the right and passes no mask."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = exported(family)
    pairs = [(item["q"], f" {choice}") for item in ITEMS for choice in item["choices"]]
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=p, idx=0) for p in pairs]
    found = []
    for size in (1, 3, 16):
        lm = HFLM(pretrained=str(folder), device="cpu", batch_size=size)
        found.append(lm.loglikelihood(requests, disable_tqdm=True))
    for others in found[1:]:
        assert [value for value, _ in others] == pytest.approx([v for v, _ in found[0]], abs=1e-4)
        assert [greedy for _, greedy in others] == [greedy for _, greedy in found[0]]


# ------------------------------------------------------------------------------------ tokenizers of exports


def test_an_export_contains_its_tokenizer(exported, tokenizer_file):
    from transformers import AutoConfig, AutoTokenizer

    folder = exported("attention")
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.encode("the sun") == load_tokenizer(tokenizer_file).encode("the sun")
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)
    assert AutoConfig.from_pretrained(folder).eos_token_id == 0


PROMPTS = ["The sun and the wind", "I", "To clean the"]


@torch.no_grad()
def test_an_export_generates_in_batches_without_setup(family, exported):
    """Padding token and side need no setup; batch mates do not change a row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    folder = exported(family)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.padding_side, tokenizer.pad_token_id) == ("left", 0)
    assert model.config.pad_token_id == 0
    options = {"max_new_tokens": 4, "do_sample": False}
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert not bool(inputs["attention_mask"].all())
    together = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    alone = []
    for row, prompt in zip(together, PROMPTS, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, **options)[0, ids.shape[1] :]
        assert row.tolist()[: len(made)] == made.tolist()
        alone.append(tokenizer.decode(made, skip_special_tokens=True))
    pipe = pipeline("text-generation", model=str(folder), tokenizer=str(folder), device="cpu")
    answers = pipe(PROMPTS, batch_size=3, return_full_text=False, **options)
    assert [answer[0]["generated_text"] for answer in answers] == alone


def test_the_vocabularys_padding_token_is_used(tokenizer_file, tmp_path):
    text = json.dumps(json.loads(tokenizer_file.read_text()))
    (tmp_path / "tokenizer.json").write_text(text.replace('"~": ', '"<|padding|>": '))
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token == "<|padding|>"
    assert loaded.pad_token_id == load_tokenizer(tokenizer_file).convert_tokens_to_ids("~")
    config = {"eos_token": "a", "pad_token": "b", "padding_side": "right"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    assert (load_tokenizer(tmp_path).pad_token, load_tokenizer(tmp_path).padding_side) == ("b", "left")


def test_the_tokenizer_of_bytes_is_utf_8():
    loaded = load_tokenizer("bytes")
    text = bytes(range(128)).decode() + "é€😀\u00ad\u00a0 <x"
    assert loaded.encode(text) == list(text.encode())
    assert loaded.decode(list(text.encode())) == text
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (257, 256, 256)
    assert loaded.encode("a<|endoftext|>") == [97, 256]


def test_a_converted_folder_names_the_end_of_text_token(tokenizer_file, tmp_path, capsys):
    """For a bare tokenizer.json it is taken from the configuration or from the usual names."""
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source, sizes = tmp_path / "llama", {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, num_hidden_layers=1, eos_token_id=[7, 8], bos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(source)
    text = tokenizer_file.read_text()
    (source / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|over|>"))

    def converted(name: str) -> tuple[Any, Any]:
        assert main(["convert", str(source), str(tmp_path / name)]) == 0
        return AutoTokenizer.from_pretrained(tmp_path / name), AutoConfig.from_pretrained(tmp_path / name)

    loaded, found = converted("by-id")
    assert (loaded.eos_token_id, found.eos_token_id) == (7, [7, 8])
    fields = json.loads((source / "config.json").read_text()) | {"eos_token_id": None}
    (source / "config.json").write_text(json.dumps(fields))
    assert main(["convert", str(source), str(tmp_path / "nameless")]) == 2
    assert "does not name its end-of-text token" in capsys.readouterr().err
    assert not (tmp_path / "nameless").exists()
    (source / "tokenizer.json").write_text(text)
    loaded, found = converted("by-name")
    assert (loaded.eos_token, loaded.eos_token_id, found.eos_token_id) == ("<|endoftext|>", 0, 0)
    own = {"eos_token": "the", "tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(own))
    loaded, found = converted("as-it-was")
    assert (loaded.eos_token, loaded.padding_side, loaded.pad_token) == ("the", "left", "the")
    assert found.pad_token_id == loaded.pad_token_id
    own["tokenizer_class"] = "NobodysTokenizer"
    (source / "tokenizer_config.json").write_text(json.dumps(own | {"backend": "nobodys"}))
    assert main(["convert", str(source), str(tmp_path / "copied")]) == 0
    message = capsys.readouterr().err
    config = (tmp_path / "copied" / "tokenizer_config.json").read_text()
    assert ("NobodysTokenizer" in config) == ("copied unchecked" in message)


def test_an_export_refuses_a_tokenizer_larger_than_the_model(exported, tokenizer_file, tmp_path, capsys):
    with pytest.raises(AssertionError):
        exported("attention", vocab_size=299)
    assert "has 300 entries, but the model has 299; use the model's own" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


def test_unusable_tokenizers_are_refused(tmp_path, tokenizer_file):
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a readable tokenizer"):
        load_tokenizer(tmp_path)
    tree = json.loads(tokenizer_file.read_text().replace("<|endoftext|>", "<|over|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="does not name its end-of-text token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|over|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    assert load_tokenizer(tmp_path).eos_token_id == 0
