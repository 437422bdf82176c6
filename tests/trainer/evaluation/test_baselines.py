"""Benchmarks of a trained transformers baseline, from its run and from its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_blocks.__main__ import main as library
from trainer.data.tokens import write_tokens
from trainer.evaluation.command import main
from trainer.run.build import build

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    },
    "rwkv": {"hidden_size": 16, "num_hidden_layers": 2, "rescale_every": 1},
}  # fmt: skip


def scores(folder: Path) -> dict[str, Any]:
    [result] = json.loads((folder / "results.json").read_text())["results"]
    return {
        task: {name: value for name, value in found.items() if name not in ("seconds", "search")}
        for task, found in result["tasks"].items()
    }


@pytest.mark.parametrize("architecture", SIZES)
def test_a_baseline_is_evaluated(
    architecture: str,
    small: Any,
    benchmarks: Path,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    write_tokens(tmp_path / "text.bin", np.arange(2000) % 300, vocab_size=300)
    model = {
        "kind": "transformers", "architecture": architecture, "config": SIZES[architecture],
        "vocab_size": 300,
    }  # fmt: skip
    spec = small(
        {
            "model": model,
            "data": {"kind": "tokens", "path": str(tmp_path / "text.bin"), "seq_len": 16},
            "training.max_steps": 2,
            "evaluation.lengths": [16],
        }
    )
    build(spec, output=tmp_path / "run", device="cpu").train()
    common = ["--data", str(benchmarks), "--tokenizer", str(tokenizer_file), "--max-length", "64"]
    common += ["--tasks", "piqa", "lambada", "--device", "cpu"]
    assert main(["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "of_run"), *common]) == 0
    found = scores(tmp_path / "of_run")
    assert found["lambada"]["perplexity"] > 1
    if architecture != "llama":
        return
    # The library reads an ordinary Llama as its own explicit model, with another forward pass.
    spec_file = str(tmp_path / "run" / "spec.yaml")
    exported = str(tmp_path / "exported")
    assert library(["export", spec_file, exported, "--checkpoint", str(tmp_path / "run")]) == 0
    assert main(["--checkpoint", exported, "--output", str(tmp_path / "of_folder"), *common]) == 0
    for task, again in scores(tmp_path / "of_folder").items():
        for name, value in again.items():
            assert value == pytest.approx(found[task][name], rel=1e-3), (task, name)
