"""The explicit twin of a composed model: the same stacks, with the core run once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.describing import changes
from implicit_blocks.specs import load_spec

SANDWICH = """
extends: word_problem_s3
phases: []
model:
  n_layers: 4
  layers: [{mixer: {kind: mamba2, head_dim: 32}}, {mixer: {kind: attention, n_heads: 4}}]
  prelude: {n_layers: 1, mixer: {kind: attention, n_heads: 4}}
  coda: {n_layers: 2, norm_placement: sandwich}
  prelude_norm: true
  core_norm: false
  embedding_scale: 3
  logit_softcap: 20
  weight_norm: false
  injection: {kind: residual}
  z_init: prelude
  depth: {kind: poisson, mean: 4}
  gradient: {kind: last_loops, loops: 2}
  exit_gate: true
  objective: {kind: exit_mixture}
  state_policy: per_loop
  at_evaluation: {exit: {kind: fixed, loops: 3}}
"""
KEPT = (
    ("n_layers", 4),
    ("prelude_norm", True),
    ("core_norm", False),
    ("embedding_scale", 3),
    ("logit_softcap", 20),
)


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    (tmp_path / "sandwich.yaml").write_text(SANDWICH, encoding="utf-8")
    return load_spec(tmp_path / "sandwich.yaml")


@pytest.fixture
def twin(spec: Any, tmp_path: Path) -> Any:
    text = "extends: sandwich.yaml\nmodel: {kind: explicit_lm}\n"
    (tmp_path / "twin.yaml").write_text(text, encoding="utf-8")
    return load_spec(tmp_path / "twin.yaml")


def test_the_twin_by_kind_alone_keeps_every_stack(spec: Any, twin: Any) -> None:
    assert twin.model.kind == "explicit_lm"
    assert twin.model.stacks == spec.model.stacks
    for name, value in KEPT:
        assert getattr(twin.model, name) == value, name
    assert not {"injection", "depth", "gradient", "exit_gate", "z_init"} & set(type(twin.model).model_fields)


def test_the_difference_of_the_twins_is_what_only_one_has(spec: Any, twin: Any) -> None:
    found = changes(spec, twin)
    assert found[0].path == ("model", "kind")
    fields = set(type(spec.model).model_fields) - set(type(twin.model).model_fields)
    assert {change.path[1] for change in found[1:]} <= fields
    assert {change.new for change in found[1:]} == {"—"}


@pytest.mark.parametrize("injection", ["residual", "none"])
def test_one_loop_from_the_prelude_is_the_twin(injection: str, spec: Any, twin: Any) -> None:
    chosen = spec.model.model_copy(update={"injection": {"kind": injection}})
    torch.manual_seed(0)
    implicit, explicit = ib.build(chosen).eval(), ib.build(twin.model).eval()
    loaded = explicit.load_state_dict(implicit.state_dict(), strict=False)
    assert not loaded.missing_keys
    assert all(name.startswith("exit_gate") or "draws" in name for name in loaded.unexpected_keys)
    ids = torch.randint(6, (2, 7))
    with torch.no_grad():
        looped = implicit(ids, loops=1).logits
        torch.testing.assert_close(looped, explicit(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_core_of_another_width_has_no_twin() -> None:
    overrides = ["model.core_d_model=32", "model.core_projection=true", "model.injection.kind=concat"]
    with pytest.raises(ValueError, match=r"core_d_model: .*width 64.*width 32.*core_d_model: null"):
        load_spec("word_problem_s3_explicit", overrides[:2])
    assert load_spec("word_problem_s3", overrides).model.core_width == 32  # type: ignore[attr-defined]  # of a model
