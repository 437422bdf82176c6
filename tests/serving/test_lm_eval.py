"""lm-eval's client of completions: the log-likelihoods of the trainer's own evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytest.importorskip("tenacity", reason="tenacity is not installed")

TEXTS = [
    ("the cat sat on", " the mat"),
    ("the dog", " sat by the cat."),
    ("naïve", " café"),
    ("a", " b c d e f g"),
    ("the mat and the dog sat", " there"),
]


def test_log_likelihoods_are_those_of_trainer_evaluate(make_model, start, tokenizer_file, tmp_path):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from implicit_blocks.hf import from_library
    from implicit_blocks.hf.tokenizer import load_tokenizer
    from implicit_blocks.serving.language import Words
    from trainer.evaluation.harness import HarnessLM

    model, tokenizer = make_model("attention", vocab_size=300), load_tokenizer(tokenizer_file)
    tokenizer.save_pretrained(tmp_path)
    requests: list[Any] = [SimpleNamespace(args=pair) for pair in TEXTS]
    ours = HarnessLM(from_library(model), tokenizer, max_length=64)
    expected = ours.loglikelihood(requests, disable_tqdm=True)
    server = start(model, Words(tokenizer))
    theirs = LocalCompletionsAPI(
        model="tiny",
        base_url=f"{server.url}/v1/completions",
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
        batch_size=2,
        max_length=64,
        max_retries=1,
    )
    found = theirs.loglikelihood(requests, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert min(value for value, _ in found) < -5
