"""Two processes share an evaluation and write what one writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.tokens import write_tokens
from trainer.evaluation.command import main as evaluate
from trainer.run.build import build

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

CONTINUED = """\
task: continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}, cache_dir: {cache}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{goal}}}}"
doc_to_target: "{{{{sol1}}}}"
generation_kwargs: {{until: ["Z"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def arguments(small: Callable[..., Any], tokenizer_file: Path, tmp_path: Path) -> list[str]:
    """Train a run with 300 tokens; return the arguments of an evaluation with scored and generated text."""
    write_tokens(tmp_path / "text.bin", np.arange(200) % 300, vocab_size=300)
    data = {"kind": "tokens", "path": str(tmp_path / "text.bin"), "seq_len": 16}
    changes = {"model.vocab_size": 300, "data": data, "training.max_steps": 1, "evaluation.lengths": [16]}
    build(small(changes), output=tmp_path / "run", device="cpu").train()
    rows = [
        {"goal": "dry it" * length, "sol1": "hang" * length, "sol2": "boil", "label": 0}
        for length in range(1, 8)
    ]
    (tmp_path / "piqa.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    yaml = CONTINUED.format(items=tmp_path / "piqa.jsonl", cache=tmp_path / "cache")
    (tmp_path / "tasks" / "continued.yaml").write_text(yaml)
    given = ["--checkpoint", tmp_path / "run", "--tokenizer", tokenizer_file, "--data", tmp_path]
    given += ["--tasks", "piqa", "continued", "--include-path", tmp_path / "tasks", "--batch-size", 3]
    given += ["--tokens", tmp_path / "text.bin", "--lengths", 16, "--limit", 7, "--log-samples"]
    return [*map(str, given), "--device", "cpu", "--output"]


def without_times(folder: Path) -> Any:
    record = json.loads((folder / "results.json").read_text())
    for row in (*record["results"][0]["tasks"].values(), *record["lengths"]):
        assert row.pop("seconds") > 0
    return record, (folder / "samples.jsonl").read_text()


def test_two_processes_write_the_results_of_one(
    arguments: list[str], processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert evaluate([*arguments, str(tmp_path / "one")]) == 0
    wrong = [*arguments, str(tmp_path / "out"), "--tolerance", "-1"]
    ended = processes("evaluate_tasks", requests=[[*arguments, str(tmp_path / "two")], wrong])
    # Only rank 0 announces the files; an invalid request ends all processes with its exit code.
    assert ended == [[(0, 1), (2, 0)], [(0, 0), (2, 0)]]
    assert not (tmp_path / "out").exists()
    found, expected = without_times(tmp_path / "two"), without_times(tmp_path / "one")
    assert found == expected
    tasks = found[0]["results"][0]["tasks"]
    assert tasks["piqa"]["items"] == tasks["continued"]["items"] == 7
    assert tasks["piqa"]["search"]["sequences"] == 14
