"""Masks, rotation tables and the injection are computed once per pass, not once per iteration."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.mixers.attention import mixer as attention

MIXERS = {
    "mamba2": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4),
    "attention": ib.AttentionSpec(n_heads=4, n_kv_heads=2),
}


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_masks_rotations_and_injection_are_computed_once_per_pass(mixer, train, monkeypatch):
    calls = []

    def count_calls(of, name):
        original = getattr(of, name)

        def call(*arguments, **options):
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(of, name, call)

    spec = ib.ImplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, mixer=MIXERS[mixer])
    model = ib.build(spec).train(train)
    count_calls(type(model.backbone.blocks()[0].mixer), "prepare")
    count_calls(type(model.injection), "forward")
    count_calls(attention, "rotation_tables")
    with torch.set_grad_enabled(train):
        found = model(torch.randint(19, (3, 11)), tolerance=0.0, max_iterations=9)
    assert (found.solution.iterations == 9).all()
    tables = {"rotation_tables": 1} if mixer == "attention" else {}
    assert Counter(calls) == {"prepare": 2, "forward": 1} | tables
