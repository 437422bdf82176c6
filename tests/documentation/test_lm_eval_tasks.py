"""``benchmarks/lm_eval_tasks.py``: ten tasks by name, in our command and in lm-eval's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import implicit_blocks as ib

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "lm_eval_tasks.py"
PROCESS_SECONDS = 900


@pytest.mark.slow
def test_ten_tasks_by_name_score_as_in_lm_eval(
    tmp_path: Path, tokenizer_file: Path, shared_data: Any
) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from implicit_blocks.hf import from_library
    from implicit_blocks.hf.tokenizer import load_tokenizer

    fields = {"vocab_size": 300, "d_model": 16, "n_layers": 1}
    parts = {"mixer": ib.AttentionSpec(n_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)}
    model: Any = ib.build(ib.ImplicitLMSpec.model_validate({**fields, **parts})).eval()
    from_library(model).save_pretrained(tmp_path / "exported")
    load_tokenizer(tokenizer_file).save_pretrained(tmp_path / "exported")
    command = [sys.executable, str(PROGRAM), "--model", str(tmp_path / "exported"), "--limit", "6"]
    command += ["--data", str(shared_data), "--output", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len({row["task"] for row in rows}) == 10
