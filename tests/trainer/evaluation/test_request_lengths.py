"""Checks of request lengths before evaluation, and results after a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.evaluation.evaluations import evaluate, results
from trainer.data.tokens import write_tokens
from trainer.run.build import build


def test_a_too_long_continuation_leaves_the_other_tasks(exported, benchmarks, tmp_path, capsys):
    """HellaSwag's continuations are too long for 8 tokens, those of LAMBADA are not."""
    code = evaluate(
        "--checkpoint", exported, "--data", benchmarks, "--max-length", 8, "--output", tmp_path / "out",
        "--tasks", "lambada", "hellaswag", "--device", "cpu",
    )  # fmt: skip
    assert code == 1
    assert "could not be run: hellaswag" in capsys.readouterr().err
    record = results(tmp_path / "out")
    assert list(record["results"][0]["tasks"]) == ["lambada"]
    assert "a continuation has " in record["failed"]["hellaswag"]
    assert record["incomplete"] is None


def test_results_are_written_after_every_task(exported, benchmarks, tmp_path, monkeypatch):
    from trainer.evaluation import scores

    seen, run_one = [], scores._run_task

    def watched(lm, task, *, limit):
        if (tmp_path / "out" / "results.json").is_file():
            seen.append(list(results(tmp_path / "out")["results"][0]["tasks"]))
        return run_one(lm, task, limit=limit)

    monkeypatch.setattr(scores, "_run_task", watched)
    common = ["--checkpoint", exported, "--data", benchmarks, "--output", tmp_path / "out", "--device", "cpu"]
    assert evaluate(*common, "--tasks", "piqa", "winogrande", "boolq") == 0
    assert seen == [["piqa"], ["piqa", "winogrande"]]


def of_tasks(folder: Path) -> dict[str, Any]:
    [result] = results(folder)["results"]
    return {
        name: {key: value for key, value in task.items() if key != "seconds"}
        for name, task in result["tasks"].items()
    }


def test_the_training_length_limits_no_request(run_folder, benchmarks, tokenizer_file, tmp_path):
    """The run was trained on 16 tokens; its Mamba2 layers read any number, so no request is truncated."""
    common = ["--checkpoint", run_folder, "--data", benchmarks, "--tokenizer", tokenizer_file]
    common += ["--tasks", "lambada", "hellaswag", "--device", "cpu", "--output"]
    assert evaluate(*common, tmp_path / "whole") == 0
    assert evaluate(*common, tmp_path / "named", "--max-length", 4096) == 0
    assert of_tasks(tmp_path / "whole") == of_tasks(tmp_path / "named")
    assert evaluate(*common, tmp_path / "cut", "--max-length", 24) == 0  # by choice
    whole, cut = of_tasks(tmp_path / "whole"), of_tasks(tmp_path / "cut")
    assert [task["truncated"] for task in whole.values()] == [0, 0]
    assert cut["hellaswag"]["truncated"] > 0


@pytest.fixture
def of_16_positions(small, tmp_path) -> Path:
    """Train a GPT-2 whose table has 16 positions, as many as its training sequences have."""
    write_tokens(tmp_path / "text.bin", np.arange(2000) % 300, vocab_size=300)
    config = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    spec = small(
        {
            "model": {"kind": "transformers", "architecture": "gpt2", "config": config, "vocab_size": 300},
            "data": {"kind": "tokens", "path": str(tmp_path / "text.bin"), "seq_len": 16},
            "training.max_steps": 1,
            "evaluation.lengths": [16],
        }
    )
    build(spec, output=tmp_path / "run", device="cpu").train()
    return tmp_path / "run"


def test_a_table_of_positions_limits_requests(
    of_16_positions, benchmarks, tokenizer_file, refused, tmp_path, capsys
):
    run, tokens = of_16_positions, tmp_path / "text.bin"
    common = ["--checkpoint", run, "--data", benchmarks, "--tokenizer", tokenizer_file]
    common += ["--tasks", "winogrande", "lambada", "--output", tmp_path / "out", "--device", "cpu"]
    message = refused(*common)
    assert "maximum of 16 tokens" in message
    assert "lambada: " in message
    assert "requests are longer, up to " in message
    assert "--max-length 16" in message
    assert evaluate(*common, "--max-length", 4096) == 0  # cut by choice, to what the model reads
    assert of_tasks(tmp_path / "out")["lambada"]["truncated"] > 0
    measure = ["--checkpoint", run, "--tokens", tokens, "--limit", 2, "--device", "cpu", "--output"]
    assert "has positions for 16 tokens" in refused(*measure, tmp_path / "no", "--lengths", 16, 32)
    assert evaluate(*measure, tmp_path / "lengths") == 0
    assert "skipping lengths 32, 64, 128" in capsys.readouterr().out
    assert [row["length"] for row in results(tmp_path / "lengths")["lengths"]] == [16]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), OSError("the disk is gone"), RuntimeError("a bug")])
def test_finished_results_survive_a_failure(ending, exported, benchmarks, tmp_path, monkeypatch, capsys):
    """The second task fails at the second budget: earlier results are written and marked as partial."""
    from trainer.evaluation import scores

    asked, ask_one = [], scores._run_task

    def failing(lm, task, *, limit):
        asked.append(task.name)
        if len(asked) == 4:
            raise ending
        return ask_one(lm, task, limit=limit)

    monkeypatch.setattr(scores, "_run_task", failing)
    arguments = [
        "--checkpoint", exported, "--data", benchmarks, "--tasks", "piqa", "winogrande", "--device", "cpu",
        "--self-iterations", 1, 2, "--output", tmp_path / "out", "--log-samples",
    ]  # fmt: skip
    interrupted = isinstance(ending, KeyboardInterrupt)
    assert evaluate(*arguments) == (130 if interrupted else 1)
    record = results(tmp_path / "out")
    assert record["incomplete"] == ("interrupted by the user" if interrupted else None)
    assert list(record["failed"]) == ([] if interrupted else ["winogrande, 2 self-iterations"])
    assert [list(row["tasks"]) for row in record["results"]] == [["piqa", "winogrande"], ["piqa"]]
    assert ("INCOMPLETE" if interrupted else "FAILED: winogrande") in (
        tmp_path / "out" / "table.md"
    ).read_text()
    if isinstance(ending, KeyboardInterrupt):
        assert f"the results so far are in {tmp_path / 'out'}" in capsys.readouterr().err
