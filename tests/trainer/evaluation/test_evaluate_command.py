"""``python -m trainer.evaluate``: inputs, outputs, and invalid requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from safetensors.torch import save_file

from implicit_blocks import registry
from tests.trainer.evaluation.evaluations import evaluate, results
from trainer.data.tokenizing.command import main as tokenize
from trainer.data.tokens import write_tokens
from trainer.errors import CallbackError
from trainer.evaluation.command import PAPER_TASKS
from trainer.run.build import build
from trainer.specs.evaluation_tasks import EvaluationTaskSpec

# ------------------------------------------------------------------------------------ what it writes


def test_the_paper_s_table_over_self_iterations(exported, benchmarks, tmp_path, capsys):
    output = tmp_path / "out"
    code = evaluate(
        "--checkpoint", exported, "--data", benchmarks, "--output", output, "--self-iterations", 1, 4,
        "--log-samples", "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    assert sorted(path.name for path in output.iterdir()) == [
        "evaluation.png", "results.json", "samples.jsonl", "table.md",
    ]  # fmt: skip
    record = results(output)
    first, second = record["results"]
    assert (first["self_iterations"], second["self_iterations"]) == (1, 4)
    columns = ["LMB ppl", "LMB", "HS", "PIQA", "ArcE", "ArcC", "WG", "OBQA", "mean"]
    assert list(first["columns"]) == columns
    tasks = first["tasks"]
    assert list(tasks) == list(PAPER_TASKS)
    for column, task, metric in (
        ("LMB ppl", "lambada", "perplexity"), ("LMB", "lambada", "acc"), ("HS", "hellaswag", "acc_norm"),
        ("PIQA", "piqa", "acc"), ("ArcE", "arc_easy", "acc"), ("ArcC", "arc_challenge", "acc_norm"),
        ("WG", "winogrande", "acc"), ("OBQA", "openbookqa", "acc_norm"),
    ):  # fmt: skip
        assert first["columns"][column] == tasks[task][metric]
    accuracies = [first["columns"][column] for column in columns[1:-1]]
    assert first["columns"]["mean"] == pytest.approx(sum(accuracies) / 7, rel=1e-5)
    assert all(task["search"]["iterations"] == 1.0 for task in tasks.values())
    assert all(task["search"]["non_converged"] == 1.0 for task in tasks.values())
    assert record["incomplete"] is None
    assert record["files"]["piqa"]["path"].endswith("valid.jsonl")
    assert record["model"]["vocab_size"] == 300
    assert record["versions"]["lm_eval"]
    table = (output / "table.md").read_text()
    assert table in capsys.readouterr().out + "\n"
    header = next(line for line in table.splitlines() if "LMB ppl" in line)
    assert [cell.strip() for cell in header.split("|")[2:-3]] == columns
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * (3 + 4 + 3 + 3 + 3 + 3 + 3)
    assert {"task", "self_iterations", "item", "requests", "answers", "target"} <= samples[0].keys()


def test_a_run_its_checkpoint_and_its_weights_give_equal_scores(
    run_folder, benchmarks, tokenizer_file, tmp_path
):
    (checkpoint,) = (run_folder / "checkpoints").glob("step-*")
    from trainer.checkpoint.load import read_model_tensors

    save_file(read_model_tensors(checkpoint), tmp_path / "model.safetensors")
    common = ("--tokenizer", tokenizer_file, "--data", benchmarks, "--tasks", "piqa", "winogrande")
    common += ("--max-length", 64)
    sources = {
        "run": ("--checkpoint", run_folder),
        "checkpoint": ("--checkpoint", checkpoint),
        "weights": ("--checkpoint", tmp_path / "model.safetensors", "--spec", run_folder / "spec.yaml"),
    }
    found = {}
    for name, source in sources.items():
        output = tmp_path / f"of_{name}"
        assert evaluate(*source, *common, "--output", output, "--device", "cpu") == 0
        assert not (output / "evaluation.png").exists()  # a single budget has no plot
        found[name] = results(output)
    (row,) = found["run"]["results"]
    assert list(row["columns"]) == ["PIQA", "WG"]  # no mean of less than all of the paper's columns
    assert row["self_iterations"] is None
    assert found["run"]["name"] == "mine"
    for name in ("checkpoint", "weights"):
        (other,) = found[name]["results"]
        for task, scores in row["tasks"].items():
            same = {k: v for k, v in scores.items() if k != "seconds"}
            assert {k: v for k, v in other["tasks"][task].items() if k != "seconds"} == same


def test_the_command_writes_perplexity_against_length(run_folder, tmp_path):
    output = tmp_path / "lengths"
    code = evaluate(
        "--checkpoint", run_folder, "--tokens", tmp_path / "text.bin", "--limit", 4,
        "--output", output, "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    record = results(output)
    assert record["results"] == []
    assert [row["length"] for row in record["lengths"]] == [16, 32, 64, 128]
    assert all(row["perplexity"] > 1.0 and row["sequences"] == 4 for row in record["lengths"])
    assert all(row["non_converged"] is not None for row in record["lengths"])
    assert (output / "evaluation.png").is_file()
    assert "| length |" in " ".join((output / "table.md").read_text().split())


def test_perplexity_is_of_held_out_tokens_where_there_are_some(run_folder, tmp_path):
    tokens = tmp_path / "tokens"
    for name, text in (("a", "seen in training "), ("b", "held out, and other ")):
        (tmp_path / f"{name}.txt").write_text(20 * text)
    made = ["--validation", str(tmp_path / "b.txt"), "--tokenizer", "bytes", "--output", str(tokens)]
    assert tokenize([str(tmp_path / "a.txt"), *made]) == 0
    found = {}
    for name, path in (("whole", tokens), ("held-out", tokens / "validation"), ("train", tokens / "train")):
        output = tmp_path / name
        arguments = ["--tokens", path, "--lengths", 16, "--limit", 3, "--output", output, "--device", "cpu"]
        assert evaluate("--checkpoint", run_folder, *arguments) == 0
        found[name] = results(output)
    assert found["whole"]["settings"]["tokens"] == str(tokens / "validation")
    (whole,), (held_out,), (train,) = (each["lengths"] for each in found.values())
    assert whole["perplexity"] == held_out["perplexity"] != train["perplexity"]


@pytest.mark.parametrize("mixed", [False, True], ids=["tokens", "mixture"])
def test_incompatible_tokens_are_rejected(small, tmp_path, capsys, mixed):
    """Training text instead of held-out text, another tokenizer, documents without known end tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="another tokenizer than bytes")
    (tmp_path / "a.txt").write_text(50 * "seen in training ")
    alone = [str(tmp_path / "a.txt"), "--workers", "1", "--output"]
    assert tokenize([*alone, str(tmp_path / "own"), "--tokenizer", "bytes"]) == 0
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "seen": 1}, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    other = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--end-of-document", "<eos>"]
    assert tokenize([*alone, str(tmp_path / "other"), *other, "--validation-fraction", "0.5"]) == 0
    write_tokens(tmp_path / "plain.bin", np.arange(500) % 257, vocab_size=257)
    data = {"kind": "tokens", "path": str(tmp_path / "own"), "seq_len": 16, "documents": "reset"}
    if mixed:
        sources = [{"weight": weight, "data": data} for weight in (1, 2)]
        data = {"kind": "mixture", "seq_len": 16, "sources": sources}
    spec = small({"model.vocab_size": 257, "data": data, "training.max_steps": 1, "evaluation.lengths": [16]})
    build(spec, name="mine", output=tmp_path / "run", device="cpu").train()
    arguments = ["--checkpoint", tmp_path / "run", "--lengths", 16, "--limit", 2, "--device", "cpu"]
    for tokens, message in (
        ("own", "own has no validation split; give held-out tokens, or "),
        ("other", "were written with a different tokenizer than those that mine was trained on"),
        ("plain.bin", "mine was trained with separate documents"),
    ):
        assert evaluate(*arguments, "--tokens", tmp_path / tokens, "--output", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    arguments += ["--tokens", tmp_path / "own" / "train", "--output", tmp_path / "out"]
    assert evaluate(*arguments) == 0
    assert results(tmp_path / "out")["settings"]["documents"] == "reset"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-length", 8], "--max-length applies to tasks, but only --tokens is given; omit it"),
        (["--log-samples"], "--log-samples applies to tasks"),
        (["--lengths", 16, 16], "--lengths contains 16 2 times; give each value once"),
        (["--self-iterations", 3, 3], "--self-iterations contains 3 2 times; give each value once"),
    ],
)
def test_options_without_an_effect_are_refused(run_folder, tmp_path, capsys, options, message):
    output = tmp_path / "out"
    arguments = ["--checkpoint", run_folder, "--tokens", tmp_path / "text.bin", "--output", output]
    assert evaluate(*arguments, *options) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_the_command_writes_perplexity_against_self_iterations(run_folder, tmp_path):
    output = tmp_path / "budgets"
    code = evaluate(
        "--checkpoint", run_folder, "--tasks", "--tokens", tmp_path / "text.bin", "--limit", 2,
        "--lengths", 16, 32, "--self-iterations", 1, 3, "--tolerance", 0, "--output", output,
        "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    rows = results(output)["lengths"]
    assert [(row["self_iterations"], row["length"]) for row in rows] == [(1, 16), (1, 32), (3, 16), (3, 32)]
    assert [row["iterations_max"] for row in rows] == [1, 1, 3, 3]
    assert rows[0]["perplexity"] != rows[2]["perplexity"]
    assert (output / "evaluation.png").is_file()
    assert "| length | self-iterations |" in " ".join((output / "table.md").read_text().split())


def test_perplexity_of_a_run_needs_no_packages_of_the_extra(run_folder, tmp_path, python):
    """Runs in a process in which neither lm-eval nor transformers can be imported."""
    hidden = "import sys; sys.modules.update(lm_eval=None, transformers=None); "
    arguments = [
        "--checkpoint", run_folder, "--tokens", tmp_path / "text.bin", "--limit", 1,
        "--lengths", 16, "--output", tmp_path / "alone", "--device", "cpu",
    ]  # fmt: skip
    command = (
        f"{hidden}from trainer.evaluation.command import main; sys.exit(main({[*map(str, arguments)]!r}))"
    )
    done = python.run(["-c", command], cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "alone" / "results.json").is_file()


@pytest.mark.parametrize("architecture", ["llama", "mamba2"])
def test_a_baseline_of_transformers_is_evaluated(architecture, small, benchmarks, tokenizer_file, tmp_path):
    write_tokens(tmp_path / "text.bin", np.arange(2000) % 300, vocab_size=300)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1}
    own = {
        "llama": {"intermediate_size": 24, "num_attention_heads": 2},
        "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    }
    spec = small(
        {
            "model": {
                "kind": "transformers",
                "architecture": architecture,
                "vocab_size": 300,
                "config": sizes | own[architecture],
            },
            "data": {"kind": "tokens", "path": str(tmp_path / "text.bin"), "seq_len": 16},
            "training.max_steps": 1,
            "evaluation.lengths": [16],
        }
    )
    build(spec, output=tmp_path / "run", device="cpu").train()
    found = []
    for padding in ("right", "left"):
        code = evaluate(
            "--checkpoint", tmp_path / "run", "--data", benchmarks, "--tokenizer", tokenizer_file, "--tasks",
            "piqa", "lambada", "--max-length", 64, "--padding", padding, "--output", tmp_path / padding,
            "--device", "cpu", "--batch-size", 3,
        )  # fmt: skip
        assert code == 0
        found.append(results(tmp_path / padding)["results"][0])
    assert found[0]["tasks"]["piqa"]["search"] is None
    assert found[0]["columns"] == pytest.approx(found[1]["columns"], rel=1e-3)


def test_a_task_may_name_another_file(exported, benchmarks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    piqa = benchmarks / "piqa" / "valid.jsonl"
    assert evaluate("--checkpoint", exported, "--tasks", f"piqa={piqa}", "--device", "cpu") == 0
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith("exported-")
    assert results(folder)["files"]["piqa"]["path"] == str(piqa)


def test_a_task_of_a_plugin_is_evaluated(exported, benchmarks, tmp_path):
    """A plugin registers a kind: its spec, and a builder that returns a task of lm-eval."""
    with registry.isolated():
        registry.add("evaluation_task", RhymeSpec, build_rhyme, owner="acme", version="1")
        code = evaluate(
            "--checkpoint", exported, "--data", benchmarks, "--tasks", "piqa", "acme.rhyme",
            "--output", tmp_path / "out", "--device", "cpu",
        )  # fmt: skip
    assert code == 0
    (row,) = results(tmp_path / "out")["results"]
    assert list(row["columns"]) == ["PIQA", "acme.rhyme acc"]


class RhymeSpec(EvaluationTaskSpec):
    """Two rhymes."""

    kind: Literal["acme.rhyme"] = "acme.rhyme"
    columns: ClassVar[dict[str, str]] = {}


def build_rhyme(spec: RhymeSpec, *, data: Path) -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = [{"q": "The cat sat on the", "a": "mat"}, {"q": "Roses are red, violets are", "a": "blue"}]
    return ConfigurableTask(
        config={
            "task": "rhyme",
            "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "loglikelihood",
            "doc_to_text": "{{q}}",
            "doc_to_target": " {{a}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )


# ------------------------------------------------------------------------------------ what it refuses


def test_all_missing_files_are_listed(exported, benchmarks, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.evaluation.tasks._known_to_lm_eval", lambda *_: False)  # takes seconds
    (benchmarks / "piqa" / "valid.jsonl").unlink()
    (benchmarks / "arc" / "arc_easy_test_llmfoundry.jsonl").unlink()
    message = refused(
        "--checkpoint", exported, "--data", benchmarks, "--output", tmp_path / "out",
        "--tasks", "piqa", "arc_easy", "winogrande", "hellaswg", "mine.yaml", "winogrande",
    )  # fmt: skip
    assert "piqa: no file" in message
    assert "arc_easy: no file" in message
    assert "hellaswg: unknown evaluation task; did you mean 'hellaswag'?" in message
    assert "lm_eval: no file mine.yaml" in message
    assert "winogrande: given twice" in message
    assert message.count("\n") == 6


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path, small_model, tokenizer_file, benchmarks, refused):
    from implicit_blocks.hf import from_library

    from_library(small_model(vocab_size=288)).save_pretrained(tmp_path / "small")
    message = refused(
        "--checkpoint", tmp_path / "small", "--tokenizer", tokenizer_file, "--data", benchmarks,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert "has 300 entries, but the model has 288" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere"], "nowhere does not exist"),
        (["--checkpoint", "{data}"], "is not a run, checkpoint or pretrained folder"),
        (["--checkpoint", "{exported}", "--spec", "llama_130m"], "contains its own config"),
        (["--checkpoint", "{exported}/model.safetensors"], "set --spec"),
        (
            ["--checkpoint", "{exported}/model.safetensors", "--spec", "word_problem_s3"],
            "has no tokenizer",
        ),
        (["--checkpoint", "{exported}", "--tokenizer", "{data}"], "no tokenizer at"),
        (
            ["--checkpoint", "{exported}", "--tokenizer", "{data}/piqa/valid.jsonl"],
            "is not a readable tokenizer",
        ),
        (["--checkpoint", "{exported}", "--tasks"], "there is nothing to evaluate"),
        (["--checkpoint", "{exported}", "--lengths", "8"], "--lengths requires --tokens"),
        (["--checkpoint", "{exported}", "--tolerance", "-1"], "error: tolerance: should be greater than or"),
        (["--checkpoint", "{exported}", "--output", "{data}"], "choose another --output"),
        (["--checkpoint", "{exported}", "--device", "tpu9"], "is not a device's name"),
    ],
)
def test_invalid_requests_are_reported(arguments, message, exported, benchmarks, refused, tmp_path):
    given = [argument.format(exported=exported, data=benchmarks) for argument in arguments]
    if "--tasks" not in given:
        given += ["--tasks", "piqa"]
    assert message in refused(*given, "--data", benchmarks)


def test_explicit_models_have_no_self_iterations(tmp_path, benchmarks, tokenizer, refused):
    import implicit_blocks as ib
    from implicit_blocks.hf import from_library

    spec = ib.ExplicitLMSpec(vocab_size=300, d_model=16, n_layers=1, mixer=ib.AttentionSpec(n_heads=2))
    from_library(ib.build(spec)).save_pretrained(tmp_path / "explicit")
    tokenizer.save_pretrained(tmp_path / "explicit")
    for options in (("--self-iterations", 1, 2), ("--tolerance", 0.1)):
        message = refused("--checkpoint", tmp_path / "explicit", "--data", benchmarks, *options)
        assert f"does not search for fixed points; omit {options[0]}" in message


def test_foreign_weights_are_refused(run_folder, exported, benchmarks, tokenizer_file, refused, tmp_path):
    message = refused(
        "--checkpoint", exported / "model.safetensors", "--spec", run_folder / "spec.yaml",
        "--tokenizer", tokenizer_file, "--data", benchmarks, "--output", tmp_path / "out",
    )  # fmt: skip
    assert "do not fit its configuration" in message


def test_a_damaged_item_is_reported_before_evaluation(exported, benchmarks, refused, tmp_path):
    with (benchmarks / "piqa" / "valid.jsonl").open("a") as file:
        file.write('{"goal": ')
    message = refused("--checkpoint", exported, "--data", benchmarks, "--output", tmp_path / "out")
    assert "valid.jsonl, line 4: not JSON" in message


def test_a_request_that_does_not_fit_writes_nothing(exported, benchmarks, refused, tmp_path):
    message = refused(
        "--checkpoint", exported, "--data", benchmarks, "--max-length", 2, "--output", tmp_path / "out"
    )
    assert "maximum of 2 tokens" in message
    assert "  piqa: a continuation has " in message
    assert "  hellaswag: a continuation has " in message
    assert not (tmp_path / "out").exists()


def test_a_bytes_run_is_evaluated_on_text(small, benchmarks, tokenizer_file, refused, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
    text = [str(tmp_path / "text.txt"), "--workers", "1", "--tokenizer", "bytes"]
    assert tokenize([*text, "--output", str(tmp_path / "tokens")]) == 0
    data = {"kind": "tokens", "path": str(tmp_path / "tokens"), "seq_len": 12}
    spec = small({"model.vocab_size": 257, "data": data, "training.max_steps": 1, "evaluation.lengths": [12]})
    build(spec, output=tmp_path / "run", device="cpu").train()
    common = ["--checkpoint", tmp_path / "run", "--data", benchmarks, "--tasks", "lambada", "--device", "cpu"]
    assert evaluate(*common, "--output", tmp_path / "found", "--log-samples") == 0
    assert evaluate(*common, "--tokenizer", "bytes", "--output", tmp_path / "named", "--log-samples") == 0
    found, named = (results(tmp_path / name)["results"][0]["columns"] for name in ("found", "named"))
    assert found == named
    assert "has 300 entries, but the model has 257" in refused(*common, "--tokenizer", tokenizer_file)


# ------------------------------------------------------------------------------------ in a run


def with_benchmarks(small, tmp_path, benchmarks, tokenizer_file, **changes: Any) -> Any:
    write_tokens(tmp_path / "text.bin", np.arange(2000) % 300, vocab_size=300)
    callback = {
        "kind": "benchmarks",
        "tasks": [{"kind": "piqa"}, {"kind": "winogrande"}],
        "data": str(benchmarks),
        "tokenizer": str(tokenizer_file),
        "max_length": 64,
    }
    return small(
        {
            "model.vocab_size": 300,
            "data": {"kind": "tokens", "path": str(tmp_path / "text.bin"), "seq_len": 16},
            "training.max_steps": 2,
            "evaluation.lengths": [16],
            "callbacks": [callback | changes],
        }
    )


def test_a_run_reports_missing_evaluation_packages(small, tmp_path, benchmarks, tokenizer_file, monkeypatch):
    spec = with_benchmarks(small, tmp_path, benchmarks, tokenizer_file)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"lm_eval: not installed; pip install -c .*\[eval\]'"):
        build(spec, output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_run_evaluates_benchmarks_during_training(small, tmp_path, benchmarks, tokenizer_file):
    spec = with_benchmarks(small, tmp_path, benchmarks, tokenizer_file)
    build(spec, output=tmp_path / "run", device="cpu").train()
    build(spec, output=tmp_path / "run", device="cpu", resume=True).train()  # evaluated once more
    rows = [json.loads(line) for line in (tmp_path / "run" / "benchmarks.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2]
    assert list(rows[0]["columns"]) == ["PIQA", "WG"]
    assert rows[0]["tasks"]["piqa"]["search"]["sequences"] == 6
    plain = spec.model_copy(update={"callbacks": ()})
    build(plain, output=tmp_path / "plain", device="cpu").train()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "plain")
    ]
    assert losses[0] == losses[1]  # the training is the same with and without
    assert evaluate(
        "--checkpoint", tmp_path / "run", "--data", benchmarks, "--tokenizer", tokenizer_file,
        "--tasks", "piqa", "winogrande", "--max-length", 64, "--output", tmp_path / "out", "--device", "cpu",
    ) == 0  # fmt: skip
    assert results(tmp_path / "out")["results"][0]["columns"] == rows[0]["columns"]


def test_a_run_refuses_benchmarks_without_files_before_it_begins(small, tmp_path, benchmarks, tokenizer_file):
    (benchmarks / "piqa" / "valid.jsonl").unlink()
    spec = with_benchmarks(small, tmp_path, benchmarks, tokenizer_file)
    with pytest.raises(ValueError, match="piqa: no file"):
        build(spec, output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_run_refuses_benchmarks_that_do_not_fit_before_it_begins(
    small, tmp_path, benchmarks, tokenizer_file
):
    spec = with_benchmarks(small, tmp_path, benchmarks, tokenizer_file, max_length=2)
    with pytest.raises(CallbackError, match="a continuation has"):
        build(spec, output=tmp_path / "run", device="cpu").train()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_mean_number_of_iterations_is_kept_for_token_files(run_folder, benchmarks, tmp_path, refused):
    write_tokens(tmp_path / "text.bin", np.arange(2000) % 257, vocab_size=257)
    given = ["--checkpoint", run_folder, "--tokens", tmp_path / "text.bin", "--lengths", 16, "--limit", 100]
    asked = [*given, "--mean-iterations", 5, "--batch-size", 4, "--device", "cpu"]
    assert evaluate(*asked, "--output", tmp_path / "out") == 0
    assert results(tmp_path / "out")["lengths"][0]["iterations"] == pytest.approx(5.0, rel=0.05)
    for wrong, named in (
        (["--mean-iterations", 0.5], "at least 1"),
        (["--mean-iterations", 8, "--self-iterations", 8], "below every limit"),
        (["--mean-iterations", 8, "--tasks", "piqa", "--data", benchmarks], "--tokens alone"),
    ):
        assert named in refused(*given, *wrong)
