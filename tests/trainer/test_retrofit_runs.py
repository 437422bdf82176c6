"""Runs that start with the layers of an explicit model as prelude, core and coda."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.errors import CheckpointError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]

MIXER = {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}
EXPLICIT = {"kind": "explicit_lm", "d_model": 16, "n_layers": 4, "mixer": MIXER}
SANDWICH = {
    "kind": "implicit_lm",
    "weight_norm": False,
    "d_model": 16,
    "prelude": {"n_layers": 1},
    "n_layers": 2,
    "coda": {"n_layers": 1},
    "mixer": MIXER,
    "injection": {"kind": "residual", "gate_init": 0},
    "depth": {"kind": "fixed", "loops": 2},
    "gradient": {"kind": "last_loops", "loops": 1},
}
TOKENS = torch.arange(6)[None]


@pytest.fixture(scope="module")
def explicit(small: Small, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Return a run of an explicit model, and its logits."""
    folder = tmp_path_factory.mktemp("explicit") / "run"
    run = build(with_model(small, EXPLICIT), output=folder, device="cpu")
    run.train()
    with torch.no_grad():
        return folder, run.model.eval()(TOKENS).logits


def with_model(small: Small, model: dict[str, Any], **changes: Any) -> RunSpec:
    fields = small().model_dump(mode="json")
    fields["training"] |= changes
    return RunSpec.model_validate({**fields, "model": model})


def test_a_retrofit_starts_as_the_explicit_run_and_opens_its_gate(explicit, small: Small, tmp_path) -> None:
    folder, expected = explicit
    spec = with_model(small, SANDWICH, init_from=str(folder))
    phases = [
        {"name": "two", "until": 2},
        {"name": "three", "model": {"depth": {"kind": "fixed", "loops": 3}}},
    ]
    spec = RunSpec.model_validate({**spec.model_dump(mode="json"), "phases": phases})
    run = build(spec, output=tmp_path / "run", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(run.model.eval()(TOKENS).logits, expected, atol=1e-5, rtol=0)
    assert not run.model.injection.gate.any()
    run.train()
    assert run.model.injection.gate.all()
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert {row["phase"] for row in rows if "loss" in row} == {"two", "three"}


@pytest.mark.parametrize("gate_init", [None, 0.5])
def test_a_retrofit_without_a_closed_gate_equals_the_explicit_run_with_one_loop(
    gate_init, explicit, small: Small, tmp_path
) -> None:
    folder, expected = explicit
    model = SANDWICH | {"injection": {"kind": "residual", "gate_init": gate_init}}
    run = build(with_model(small, model, init_from=str(folder)), output=tmp_path / "run", device="cpu")
    with torch.no_grad():
        once = run.model.eval()(TOKENS, loops=1).logits
        torch.testing.assert_close(once, expected, atol=1e-5, rtol=0)
        assert (run.model(TOKENS, loops=3).logits - expected).abs().max() > 1e-4


def test_a_pretrained_folder_is_retrofitted(small: Small, tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vocabulary = small().model.vocab_size
    config = transformers.Mamba2Config(
        vocab_size=vocabulary, hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=1,
        num_hidden_layers=4, tie_word_embeddings=True,
    )  # fmt: skip
    original = transformers.Mamba2ForCausalLM(config).eval()
    original.save_pretrained(tmp_path / "original")
    model = SANDWICH | {"vocab_size": vocabulary, "mixer": MIXER | {"chunk_size": 64}}
    spec = with_model(small, model, init_from=str(tmp_path / "original"))
    run = build(spec, output=tmp_path / "run", device="cpu")
    with torch.no_grad():
        expected = original(TOKENS).logits
        torch.testing.assert_close(run.model.eval()(TOKENS).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coda": {"n_layers": 2}}, r"model\.coda\.n_layers"),
        ({"n_layers": 5}, r"core 1:6 is outside the model's 4 layers"),
        ({"d_model": 32}, r"model\.d_model: 16 → 32"),
    ],
)
def test_a_division_that_does_not_fit_the_layers_is_refused(
    changes, message, explicit, small: Small, tmp_path
) -> None:
    spec = with_model(small, SANDWICH | changes, init_from=str(explicit[0]))
    with pytest.raises(CheckpointError, match=message):
        build(spec, output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
