"""The blocks of docs/fine-tuning.md, run in order on a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fine-tuning.md"
SMALL = (
    *("data.path=tokens", "model.vocab_size=300", "model.d_model=16", "model.n_layers=1"),
    *("model.mixer.n_heads=2", "model.mlp.d_ff=24", "training.max_tokens=4096"),
)
PROCESS_SECONDS = 900


def call(folder: Path, *words: str) -> None:
    """Run ``python …`` in a folder."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_blocks_run_in_order(tmp_path: Path) -> None:
    for package in ("transformers", "datasets", "peft", "trl"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    blocks = [part.partition("\n") for part in PAGE.read_text(encoding="utf-8").split("```")[1::2]]
    (tmp_path / "input.txt").write_text("the sky is blue and the grass is green\n" * 400)
    pairs = [("sky?", "blue"), ("grass?", "green"), ("snow?", "white"), ("coal?", "black")] * 5
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    chat = "".join(f"{json.dumps({'messages': row})}\n" for row in rows)
    (tmp_path / "chat.jsonl").write_text(chat)
    tokenize = [
        "-m",
        "trainer.tokenize",
        "input.txt",
        "--validation-fraction",
        "0.1",
        "--train-tokenizer",
        "300",
    ]
    call(tmp_path, *tokenize, "--output", "tokens")
    call(tmp_path, "-m", "trainer", "--spec", "shakespeare", *SMALL, "--output", "runs/shakespeare")
    names: dict[str, Any] = {}
    for information, _, text in blocks:
        if information.startswith("sh"):
            for line in text.strip().splitlines():
                program, *words = shlex.split(line.replace("max_tokens=2e5", "max_tokens=4096"))
                assert program == "python"
                own = [*SMALL[1:-1]] if words[1] == "trainer" else []
                call(tmp_path, *words, *own)
        elif information.startswith("python"):
            if "exported" in text and not (tmp_path / "exported").exists():
                call(tmp_path, "-m", "implicit_blocks", "export", "runs/chat", "exported")
            text = text.replace("SFTConfig(", "SFTConfig(use_cpu=True, bf16=False, report_to=[], ")
            with contextlib.chdir(tmp_path):
                exec(compile(text, information, "exec"), names)  # a block of the page
    call(tmp_path, "-m", "implicit_blocks", "generate", "merged", "sky?", "--max-new-tokens", "3")
